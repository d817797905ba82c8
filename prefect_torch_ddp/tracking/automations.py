"""Automations on Prefect's server, each known by its name: created, or replaced."""

from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.events.schemas.automations import AutomationCore


def delete_automation(name: str) -> None:
    """Delete the automation of the name, if there is one."""
    with get_client(sync_client=True) as client:
        for found in client.read_automations_by_name(name):
            client.delete_automation(found.id)


def replace_automation(automation: AutomationCore) -> UUID:
    """Create an automation, or replace and enable the one of the same name; return its id."""
    # The client sends only what was set.
    automation = automation.model_copy(update={"enabled": True})
    with get_client(sync_client=True) as client:
        if found := client.read_automations_by_name(automation.name):
            client.update_automation(found[0].id, automation)
            return found[0].id
        return client.create_automation(automation)
