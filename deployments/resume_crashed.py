"""Registers an automation that resumes a deployment's runs that crashed.

Call it again after a change: the automation is replaced, and enabled if it was paused.

    python deployments/resume_crashed.py train-ddp/nightly

A run is Crashed if its process was killed. A training that failed is Failed, and isn't resumed. The
new run has the parameters of the crashed one, but `resume_from="flow-run:<its id>"` in its
`params`: it continues from the crashed run's newest checkpoint, or begins as that run did if it has
none. The flow has to be train-ddp, or to take its TrainParams as its only parameter, `params`. A
second automation pauses the first one when the deployment's runs have crashed three times within a
day.

With `--lost-after SECONDS`, a third automation sets a run to Crashed if Prefect's server has got no
heartbeat of it for so long: its machine may have gone down. Each flow run sends a heartbeat every
180 s (PREFECT_FLOWS_HEARTBEAT_FREQUENCY).
"""

import argparse
import math
import sys
from datetime import timedelta
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import StateType
from prefect.events.actions import ChangeFlowRunState, PauseAutomation, RunDeployment
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
from prefect.exceptions import ObjectNotFound
from prefect.settings import get_current_settings

from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.tracking.automations import delete_automation, replace_automation

AFTER_S = 60.0
"""For the last processes of the crashed run to end."""
MAX_CRASHES = 3
WITHIN = timedelta(days=1)
MIN_HEARTBEATS = 2
"""One may be late."""
HEARTBEAT = "prefect.flow-run.heartbeat"
SILENT_STATES = ["Completed", "Failed", "Cancelling", "Cancelled", "Crashed", "Paused", "Suspended"]
"""A run in one of these sends no heartbeats, or is none to be resumed."""
RESUMES, STOPS, LOST = "resume-crashed", "stop-resume-crashed", "lost"
PARAMETER = "params"
PARAMS = (
    "{{ dict(flow_run.parameters.params or {}, resume_from='flow-run:' ~ flow_run.id) | tojson }}"
)


def register(deployment_name: str, after_s: float, lost_after_s: float | None) -> str:
    """Create or replace the automations of a deployment; return the name of the one that resumes.

    Args:
        deployment_name: `flow/deployment`.
        after_s: how long after the crash the new run begins, in seconds.
        lost_after_s: after how long without a heartbeat a run is set to Crashed, in seconds. None:
            never.

    Raises:
        ObjectNotFound: there is no such deployment; Prefect's own error.
        InvalidParamsError: its flow has other parameters than `params`, which would be lost.
    """
    with get_client(sync_client=True) as client:
        deployment = client.read_deployment_by_name(deployment_name)
    deployment_id = deployment.id
    properties = (deployment.parameter_openapi_schema or {}).get("properties", {PARAMETER: {}})
    if properties.keys() != {PARAMETER}:
        has = ", ".join(properties) or "none"
        msg = (
            f"the flow of {deployment_name} has the parameters {has}, and only the value of "
            f"{PARAMETER}, a TrainParams, can be passed on to the run that resumes"
        )
        raise InvalidParamsError(msg)
    delete_former(deployment_name, deployment_id)
    name = f"{RESUMES}-{deployment_name}"
    template = {"__prefect_kind": "jinja", "template": PARAMS}
    resumes = AutomationCore(
        name=name,
        description=f"Resumes runs of {deployment_name} that crashed.",
        trigger=crashes(deployment_id),
        actions=[
            RunDeployment(
                source="selected",
                deployment_id=deployment_id,
                parameters={PARAMETER: {"__prefect_kind": "json", "value": template}},
                schedule_after=timedelta(seconds=after_s),
            )
        ],
    )
    stops = AutomationCore(
        name=f"{STOPS}-{deployment_name}",
        description=f"Pauses {name} after {MAX_CRASHES} crashes within a day.",
        trigger=crashes(deployment_id, threshold=MAX_CRASHES, within=WITHIN),
        actions=[PauseAutomation(automation_id=replace_automation(resumes))],
    )
    replace_automation(stops)
    lost = f"{LOST}-{deployment_name}"
    if lost_after_s is None:
        delete_automation(lost)
        return name
    silent = f"no heartbeat for {lost_after_s:g} s: its process or machine is gone"
    crashed = ChangeFlowRunState(state=StateType.CRASHED, message=silent)
    described = f"Sets runs of {deployment_name} to Crashed that send no heartbeats."
    trigger = silence(deployment_id, timedelta(seconds=lost_after_s))
    replace_automation(
        AutomationCore(name=lost, description=described, trigger=trigger, actions=[crashed])
    )
    return name


def delete_former(deployment_name: str, deployment_id: UUID) -> None:
    """Delete a deployment's automations of their former names.

    These had a dash for the slash, so that they may be another deployment's.
    """
    with get_client(sync_client=True) as client:
        for kind in (RESUMES, STOPS, LOST):
            name = f"{kind}-{deployment_name.replace('/', '-')}"
            for found in client.read_automations_by_name(name):
                if str(deployment_id) in found.trigger.model_dump_json():
                    client.delete_automation(found.id)


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


def silence(deployment_id: UUID, within: timedelta) -> EventTrigger:
    """Describe a run of a deployment whose heartbeats end, and no state says why."""
    return EventTrigger(
        match={"prefect.resource.id": "prefect.flow-run.*"},
        match_related={"prefect.resource.id": f"prefect.deployment.{deployment_id}"},
        for_each={"prefect.resource.id"},
        after={HEARTBEAT},
        expect={HEARTBEAT, *(f"prefect.flow-run.{state}" for state in SILENT_STATES)},
        posture=Posture.Proactive,
        threshold=1,
        within=within,
    )


def seconds(text: str) -> float:
    """Read a finite number of seconds."""
    value = float(text)
    if not 0 <= value < math.inf:  # NaN neither
        raise ValueError(text)
    return value


def main() -> None:
    """Register, and say what was done."""
    parser = argparse.ArgumentParser(description="Has Prefect resume a deployment's crashed runs.")
    parser.add_argument("deployment", help="its name, for example train-ddp/nightly")
    parser.add_argument(
        "--after",
        type=seconds,
        default=AFTER_S,
        metavar="SECONDS",
        help="how long after the crash the new run begins (default: %(default)g)",
    )
    parser.add_argument(
        "--lost-after",
        type=seconds,
        metavar="SECONDS",
        help="set a run to Crashed after so many seconds without a heartbeat; choose more than "
        "the server or the network may be down (default: such a run stays Running)",
    )
    given = parser.parse_args()
    heartbeat_s = get_current_settings().flows.heartbeat_frequency
    if given.lost_after is not None:
        if heartbeat_s is None:
            sys.exit("nothing was registered: PREFECT_FLOWS_HEARTBEAT_FREQUENCY is empty")
        if given.lost_after < MIN_HEARTBEATS * heartbeat_s:
            sys.exit(
                f"nothing was registered: --lost-after is {given.lost_after:g}, and heartbeats "
                f"come every {heartbeat_s} s; give at least {MIN_HEARTBEATS * heartbeat_s}"
            )
    try:
        name = register(given.deployment, given.after, given.lost_after)
    except ObjectNotFound:
        sys.exit(f"nothing was registered: there is no deployment {given.deployment}")
    except InvalidParamsError as error:
        sys.exit(f"nothing was registered: {error}")
    print(f"registered the automation {name}: a crashed run is resumed after {given.after:g} s")
    print(f"{MAX_CRASHES} crashes within a day pause it; this command enables it again")
    if given.lost_after is not None:
        print(f"a run without a heartbeat for {given.lost_after:g} s counts as crashed")


if __name__ == "__main__":
    main()
