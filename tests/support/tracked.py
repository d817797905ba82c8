"""What user code tracks beside models: a value."""

from dataclasses import dataclass
from typing import Any


@dataclass
class Tracked:
    """One value, kept in checkpoints."""

    value: Any = 0

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]
