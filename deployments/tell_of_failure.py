"""Registers an automation that posts to a webhook when a training has failed for good.

Call it again after a change: block and automation are replaced. The URL comes from the
environment, since it may hold a secret:

    WEBHOOK_URL        where to post (required): Slack, Teams, Mattermost, or your own
"""

import os
import sys

from prefect.blocks.webhook import Webhook
from prefect.events.actions import CallWebhook
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
from pydantic import SecretStr

from prefect_torch_ddp.tracking.automations import replace_automation

NAME = "train-ddp-failed"
TEXT = (
    '{"text": {{ ("Training " ~ event.payload.run_id ~ " of " ~ event.payload.experiment'
    ' ~ " failed at step " ~ event.payload.step ~ ": " ~ event.payload.cause'
    ' ~ (". To continue: resume_from=\\"" ~ event.payload.resume_from ~ "\\""'
    ' if event.payload.resume_from else "")) | tojson }} }'
)


def register(url: str) -> None:
    """Create or replace the webhook's block and the automation."""
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


def main() -> None:
    """Register, and say what was done."""
    url = os.environ.get("WEBHOOK_URL")
    if not url:
        sys.exit("nothing was registered: set WEBHOOK_URL to where failures are to be posted")
    register(url)
    print(f"registered the automation {NAME}: it posts to WEBHOOK_URL when a training has failed")


if __name__ == "__main__":
    main()
