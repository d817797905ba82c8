"""Owns functions that fail in some attempts and not in others. Torch is imported inside: the test process need not load it."""

import os
import signal
from pathlib import Path
from typing import Any

LATER = ("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "WORLD_SIZE", "RANK")


def attempt_now() -> int:
    """Return the attempt that this rank belongs to, from 1."""
    return int(os.environ["TORCHELASTIC_RESTART_COUNT"]) + 1


def fail_in(attempts: list[int], how: str, folder: str) -> dict[str, Any]:
    """Leave the parent's pid in the folder; fail on the last rank in the attempts named; else return what the rank was told."""
    import torch
    import torch.distributed as dist

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    Path(folder, f"{attempt_now()}-{rank}").write_text(str(os.getppid()))
    dist.barrier()
    if attempt_now() in attempts and rank == size - 1:
        fail(how)
    total = torch.ones(1)
    dist.all_reduce(total)
    return {"total": float(total), "value": attempt_now(), **{name: os.environ[name] for name in LATER}}


def fail(how: str) -> None:
    """Fail in the way named."""
    match how:
        case "ValueError":
            msg = "told to fail"
            raise ValueError(msg)
        case "OSError":
            msg = "the shelf is empty"
            raise OSError(msg)
        case "ImportError":
            import no_such_module  # noqa: F401  # type: ignore[import-not-found]
        case "all":
            msg = "bad lr"
            raise ValueError(msg)
        case _:
            os.kill(os.getpid(), signal.Signals[how])


def fail_everywhere() -> None:
    """Fail on every rank in the same way, once all are there."""
    import torch.distributed as dist

    dist.barrier()
    fail("all")


def hold_in_first(folder: str) -> int:
    """In the first attempt write this rank's pid and wait to be killed; later return the world's size."""
    import torch
    import torch.distributed as dist

    if attempt_now() == 1:
        path = Path(folder, os.environ["RANK"])
        path.with_suffix(".tmp").write_text(str(os.getppid()))
        path.with_suffix(".tmp").rename(path)
        signal.pause()
    total = torch.ones(1)
    dist.all_reduce(total)
    return int(total)
