"""What user code meets in a rank and in `RankContext.local()` in the same way.

Its function is found by name, its loaders' workers are forked, and its errors say what to do.
"""

import difflib
import importlib
import multiprocessing.context
from typing import Any

from prefect_torch_ddp.errors import InvalidParamsError

_BARE = (
    "on one rank, and under elastic determinism, ctx.wrap returns the model itself: use the model "
    "that you gave to it instead of .module, and ctx.micro_batches instead of .no_sync()"
)
_ADVICE = {
    "more than 1 value per channel": (
        "BatchNorm can't train on a single sample, which is all that this rank has of the global "
        "batch or of a micro-batch: pass drop_last=True to ctx.loader, or choose a "
        "global_batch_size, or a max_samples, that leaves two samples or more of an epoch's tail"
    ),
    "default process group twice": (
        "run_gang and ddp_task initialise the process group themselves; for a function that does "
        'it, give process_group="user"'
    ),
    "Timed out waiting": (  # of gloo; NCCL ends the process
        "another rank did not come to this collective in time: see where that rank was; if it may "
        "take so long, raise collective_timeout_s, or the timeout of a group that your code makes"
    ),
    "on __main__ failed": (  # of pickle, which names the class before that
        "what __main__ defines can't reach a process that is spawned in a rank, such as a loader's "
        "worker: put the class or function into its own module, or leave "
        "multiprocessing_context out, so that the process is forked"
    ),
    "RankContext.track() takes 1 positional": (
        "name what is tracked, as it is called in every checkpoint: ctx.track(model=model)"
    ),
    "Default process group has not been initialized": (
        "RankContext.local() has no process group, nor has a gang with process_group='none', or "
        "'user' before the function has made it: ask torch.distributed.is_initialized() before, or "
        "take ctx.rank and ctx.world_size"
    ),
}
"""What to do about errors of torch and of pickle, by a part of their text."""


def resolve(reference: str) -> Any:
    """Import what `package.module` or `package.module:object.attribute` names."""
    module_name, _, qualname = reference.partition(":")
    target: Any = importlib.import_module(module_name)
    for part in filter(None, qualname.split(".")):
        try:
            target = getattr(target, part)
        except AttributeError as error:
            form = "write it as package.module or package.module:object"
            msg = f"{reference!r}: {target!r} has no {part!r}; {form}"
            raise InvalidParamsError(msg) from error
    return target


def default_to_fork() -> None:
    """Have DataLoader workers forked if the user chooses no start method.

    From Python 3.14 on they would be started by a fork server, which a dataset defined in a
    script or a notebook can't reach. Not set_start_method: the user's own call would raise.
    """
    default: Any = multiprocessing.context._default_context  # noqa: SLF001
    default._default_context = multiprocessing.get_context("fork")  # noqa: SLF001


def advise(error: BaseException) -> None:
    """Add to an error of torch or of pickle what to do about it."""
    found = [advice for text, advice in _ADVICE.items() if text in text_of(error)]
    is_model = isinstance(error, AttributeError) and hasattr(type(error.obj), "named_parameters")
    if is_model and getattr(error, "name", "") in ("module", "no_sync"):
        found.append(_BARE)
    if isinstance(error, AttributeError) and type(error.obj).__name__ == "RankContext":
        near = difflib.get_close_matches(error.name or "", _public(error.obj), 1)
        found += [f"did you mean ctx.{each}?" for each in near]
    for advice in found:
        if advice not in getattr(error, "__notes__", ()):
            error.add_note(advice)


def text_of(error: BaseException) -> str:
    """Return what an error says, if it can say it."""
    try:
        return str(error)
    except BaseException:  # noqa: BLE001 - a user class's own __str__ may raise anything
        return ""


def _public(owner: object) -> list[str]:
    return [name for name in dir(owner) if not name.startswith("_")]
