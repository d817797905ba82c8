"""Registers an automation that resumes a deployment's runs that crashed.

Call it again after a change: the automation is replaced, and enabled if it was paused.

    python deployments/resume_crashed.py train-ddp/nightly

A run is Crashed if its process was killed. A training that failed is Failed, and isn't resumed. The
new run has the parameters of the crashed one, with `resume_from="latest"`. A second automation
pauses the first one when the deployment's runs have crashed three times within a day.
"""

import argparse
import sys
from datetime import timedelta
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.events.actions import PauseAutomation, RunDeployment
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
from prefect.exceptions import ObjectNotFound

from prefect_torch_ddp.tracking.automations import replace_automation

AFTER_S = 60.0
"""For the last processes of the crashed run to end."""
MAX_CRASHES = 3
WITHIN = timedelta(days=1)
PARAMS = "{{ dict(flow_run.parameters.params or {}, resume_from='latest') | tojson }}"


def register(deployment_name: str, after_s: float) -> str:
    """Create or replace the automations of a deployment; return the name of the one that resumes.

    Args:
        deployment_name: `flow/deployment`.
        after_s: how long after the crash the new run begins, in seconds.

    Raises:
        ObjectNotFound: there is no such deployment; Prefect's own error.
    """
    with get_client(sync_client=True) as client:
        deployment_id = client.read_deployment_by_name(deployment_name).id
    name = f"resume-crashed-{deployment_name.replace('/', '-')}"
    template = {"__prefect_kind": "jinja", "template": PARAMS}
    resumes = AutomationCore(
        name=name,
        description=f"Resumes runs of {deployment_name} that crashed.",
        trigger=crashes(deployment_id),
        actions=[
            RunDeployment(
                source="selected",
                deployment_id=deployment_id,
                parameters={"params": {"__prefect_kind": "json", "value": template}},
                schedule_after=timedelta(seconds=after_s),
            )
        ],
    )
    stops = AutomationCore(
        name=f"stop-{name}",
        description=f"Pauses {name} after {MAX_CRASHES} crashes within a day.",
        trigger=crashes(deployment_id, threshold=MAX_CRASHES, within=WITHIN),
        actions=[PauseAutomation(automation_id=replace_automation(resumes))],
    )
    replace_automation(stops)
    return name


def crashes(
    deployment_id: UUID, threshold: int = 1, within: timedelta = timedelta(0)
) -> EventTrigger:
    """Describe so many crashes of a deployment's runs within a time."""
    return EventTrigger(
        match={"prefect.resource.id": "prefect.flow-run.*"},
        match_related={"prefect.resource.id": f"prefect.deployment.{deployment_id}"},
        expect={"prefect.flow-run.Crashed"},
        posture=Posture.Reactive,
        threshold=threshold,
        within=within,
    )


def main() -> None:
    """Register, and say what was done."""
    parser = argparse.ArgumentParser(description="Has Prefect resume a deployment's crashed runs.")
    parser.add_argument("deployment", help="its name, for example train-ddp/nightly")
    parser.add_argument(
        "--after",
        type=float,
        default=AFTER_S,
        metavar="SECONDS",
        help="how long after the crash the new run begins (default: %(default)g)",
    )
    given = parser.parse_args()
    try:
        name = register(given.deployment, given.after)
    except ObjectNotFound:
        sys.exit(f"nothing was registered: there is no deployment {given.deployment}")
    print(f"registered the automation {name}: a crashed run is resumed after {given.after:g} s")
    print(f"{MAX_CRASHES} crashes within a day pause it; this command enables it again")


if __name__ == "__main__":
    main()
