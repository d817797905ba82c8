"""Plain values of user code that are in every checkpoint; no torch."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from prefect_torch_ddp.errors import InvalidParamsError


class Values(SimpleNamespace):
    """Values by name, as attributes; `ctx.state` makes one, and no other name can be added."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        """Start with these.

        Raises:
            InvalidParamsError: there are none, a name is taken, or a value is one that is trained.
        """
        for name, value in values.items():
            if getattr(value, "requires_grad", False):
                msg = (
                    f"{name!r} is a tensor that requires grad, and ctx.state replaces its values "
                    "at a resume, which its optimizer wouldn't notice; make it a Parameter of a "
                    "module, and give that to ctx.track"
                )
                raise InvalidParamsError(msg)
        taken = sorted(name for name in values if name.startswith("_") or hasattr(Values, name))
        if taken or not values:
            what = f"{taken[0]!r} can't name a value" if taken else "ctx.state was given no value"
            msg = f"{what}: give its values by names of your own, ctx.state(best=0.0, it=0)"
            raise InvalidParamsError(msg)
        vars(self).update(values)

    def __setattr__(self, name: str, value: Any) -> None:
        """Change a value; one that isn't there would be in no checkpoint that has others."""
        if name not in vars(self):
            msg = f"ctx.state has no value {name!r}, but {self._names()}: give it all at the start"
            raise AttributeError(msg)
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        """Refuse it: a checkpoint has all values."""
        msg = f"{name!r} can't be deleted: it is in the checkpoints; set it to None"
        raise AttributeError(msg)

    def state_dict(self) -> dict[str, Any]:
        """Return the values by name."""
        return dict(vars(self))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the values of a checkpoint, each tensor on the device of the one before it.

        Raises:
            ValueError: it has values of other names.
        """
        if state.keys() != vars(self).keys():
            msg = (
                f"it has the values {', '.join(state)}, but now there are {self._names()}; keep "
                "new values in another state, ctx.state('more', lr=0.1)"
            )
            raise ValueError(msg)
        vars(self).update({name: _placed(value, vars(self)[name]) for name, value in state.items()})

    def _names(self) -> str:
        return ", ".join(vars(self))


def _placed(value: Any, before: Any) -> Any:
    is_tensor = hasattr(value, "to") and hasattr(before, "device")
    return value.to(before.device) if is_tensor else value
