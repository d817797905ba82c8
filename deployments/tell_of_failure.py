"""Registers automations that post to a webhook when a training has failed for good, or is silent.

Call it again after a change: block and automation are replaced. The URL comes from the
environment, since it may hold a secret:

    WEBHOOK_URL        where to post (required): Slack, Teams, Mattermost, or your own

With `--silent-after SECONDS`, a second automation posts when a training that began and hasn't
finished has committed no checkpoint for so long: its queue starts no further jobs, its steps take
longer than expected, or its process was killed. A run that ends before its data is prepared isn't
told of, for example since its cluster can't be reached: see the state of its flow run.
"""

import argparse
import os
import sys
from datetime import timedelta

from prefect.blocks.webhook import Webhook
from prefect.events.actions import CallWebhook
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
from pydantic import SecretStr

from prefect_torch_ddp.tracking.automations import delete_automation, replace_automation

NAME = "train-ddp-failed"
SILENT_NAME = "train-ddp-silent"
MIN_SILENT_S = 10
"""Prefect's least."""
TEXT = (
    '{"text": {{ ("Training " ~ event.payload.run_id ~ " of " ~ event.payload.experiment'
    ' ~ " failed at step " ~ event.payload.step ~ ": " ~ event.payload.cause'
    ' ~ (". To continue: resume_from=\\"" ~ event.payload.resume_from ~ "\\""'
    ' if event.payload.resume_from else "")) | tojson }} }'
)

SILENT_TEXT = (
    '{{"text": {{{{ ("Training " ~ event.payload.run_id ~ " of " ~ event.payload.experiment'
    ' ~ " has committed no checkpoint for {silent_s} s; its last event was of step "'
    " ~ event.payload.step) | tojson }}}} }}"
)


def register(url: str, silent_s: int | None) -> None:
    """Create or replace the webhook's block and the automations.

    Args:
        url: where to post.
        silent_s: after how long without a checkpoint to post, in seconds. None: never.
    """
    block_id = Webhook(method="POST", url=SecretStr(url)).save(NAME, overwrite=True)
    automation = AutomationCore(
        name=NAME,
        description="Tells of trainings that failed and are not tried again.",
        trigger=EventTrigger(
            match={
                "prefect.resource.id": "prefect-torch-ddp.run.*",
                "prefect-torch-ddp.state": "failed",
            },
            expect={"prefect-torch-ddp.training.finished"},
            posture=Posture.Reactive,
            threshold=1,
        ),
        actions=[CallWebhook(block_document_id=block_id, payload=TEXT)],
    )
    replace_automation(automation)
    if silent_s is None:
        delete_automation(SILENT_NAME)
        return
    payload = SILENT_TEXT.format(silent_s=silent_s)
    silent = AutomationCore(
        name=SILENT_NAME,
        description="Tells of trainings that have committed no checkpoint for a while.",
        trigger=silence(timedelta(seconds=silent_s)),
        actions=[CallWebhook(block_document_id=block_id, payload=payload)],
    )
    replace_automation(silent)


def silence(within: timedelta) -> EventTrigger:
    """Describe a training that neither commits a checkpoint nor finishes for so long."""
    name = "prefect-torch-ddp.{}".format
    begins = {name("training.started"), name("training.resumed")}
    return EventTrigger(
        match={"prefect.resource.id": "prefect-torch-ddp.run.*"},
        for_each={"prefect.resource.id"},
        after=begins | {name("checkpoint.committed")},
        expect={name("checkpoint.committed"), name("training.finished")},
        posture=Posture.Proactive,
        threshold=1,
        within=within,
    )


def main() -> None:
    """Register, and say what was done."""
    parser = argparse.ArgumentParser(description="Has Prefect post when a training has failed.")
    parser.add_argument(
        "--silent-after",
        type=int,
        metavar="SECONDS",
        help="also post when a training has committed no checkpoint for so many seconds",
    )
    silent_s = parser.parse_args().silent_after
    if silent_s is not None and silent_s < MIN_SILENT_S:
        sys.exit(
            f"nothing was registered: --silent-after is {silent_s}; give at least {MIN_SILENT_S}"
        )
    url = os.environ.get("WEBHOOK_URL")
    if not url:
        sys.exit("nothing was registered: set WEBHOOK_URL to where failures are to be posted")
    register(url, silent_s)
    print(f"registered the automation {NAME}: it posts to WEBHOOK_URL when a training has failed")
    if silent_s is not None:
        print(f"{SILENT_NAME}: it posts when one has committed no checkpoint for {silent_s} s")


if __name__ == "__main__":
    main()
