"""Registers an automation that resumes a deployment's runs that crashed.

Call it again after a change: the automation is replaced.

    python deployments/resume_crashed.py train-ddp/nightly

A run is Crashed if its process was killed. A training that failed is Failed, and isn't resumed. The
new run has the parameters of the crashed one, with `resume_from="latest"`.
"""

import sys
from datetime import timedelta
from typing import Any

from prefect.automations import Automation
from prefect.client.orchestration import get_client
from prefect.events.actions import RunDeployment
from prefect.events.schemas.automations import EventTrigger, Posture
from prefect.exceptions import ObjectNotFound

WAIT = timedelta(minutes=1)
"""For the last processes of the crashed run to end, and between runs if each of them crashes."""
PARAMS = "{{ dict(flow_run.parameters.params or {}, resume_from='latest') | tojson }}"


def register(deployment_name: str) -> str:
    """Create or replace the automation for a deployment; return the automation's name."""
    with get_client(sync_client=True) as client:
        deployment = client.read_deployment_by_name(deployment_name)
    name = f"resume-crashed-{deployment_name.replace('/', '-')}"
    template = {"__prefect_kind": "jinja", "template": PARAMS}
    automation = Automation(
        name=name,
        description=f"Resumes runs of {deployment_name} that crashed.",
        trigger=EventTrigger(
            match={"prefect.resource.id": "prefect.flow-run.*"},
            match_related={"prefect.resource.id": f"prefect.deployment.{deployment.id}"},
            expect={"prefect.flow-run.Crashed"},
            posture=Posture.Reactive,
            threshold=1,
        ),
        actions=[
            RunDeployment(
                source="selected",
                deployment_id=deployment.id,
                parameters={"params": {"__prefect_kind": "json", "value": template}},
                schedule_after=WAIT,
            )
        ],
    )
    try:
        old: Any = Automation.read(name=name)
    except ValueError:  # there is none
        automation.create()
    else:
        automation.id = old.id
        automation.update()
    return name


def main() -> None:
    """Register, and say what was done."""
    if len(sys.argv) != 2:  # noqa: PLR2004 - itself and a name
        sys.exit("nothing was registered: give a deployment's name, train-ddp/nightly say")
    try:
        name = register(sys.argv[1])
    except ObjectNotFound:
        sys.exit(f"nothing was registered: there is no deployment {sys.argv[1]}")
    print(f"registered the automation {name}: a crashed run is resumed a minute later")


if __name__ == "__main__":
    main()
