"""What every rank of a gang calls: from the caller, pickled, to the ranks."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self


@dataclass(frozen=True)
class Call:
    """A function with its arguments, as every rank of a gang calls it."""

    fn: Callable[..., Any] | str
    """Any callable, `"package.module:function"`, or a script, for which see `is_script`."""
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    takes_context: bool = False
    """Whether `fn` is an entry of ours: it makes a RankContext as the RankConfig `args[0]` says,
    and calls the user's `args[1]` with it, with the arguments `args[2]` and `args[3]` if it has
    some. From then on such a call is watched, and it has checkpoints at which its gang may grow."""

    @property
    def code(self) -> Callable[..., Any] | str:
        """The user's own code: a function, a script, or a workload's name."""
        fn = self.users_own.fn
        return getattr(fn, "runs_script", fn)  # the function of a `ddp_script` isn't the user's

    @property
    def users_own(self) -> "Call":
        """The call as the user's code gets it; in the place of a RankContext is None."""
        if not self.takes_context:
            return self
        _, fn, args, kwargs = (*self.args, (), ())[:4]
        return Call(fn, (None, *args), kwargs or {})

    @property
    def name(self) -> str:
        """The function's name, for people."""
        fn = self.fn
        return fn if isinstance(fn, str) else getattr(fn, "__qualname__", type(fn).__name__)

    def with_arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Self:
        """Add arguments after those there are."""
        return replace(self, args=(*self.args, *args), kwargs={**self.kwargs, **kwargs})
