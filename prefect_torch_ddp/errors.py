"""Owns every exception of the package. Errors cross processes by pickle, cause included, and
none is a TimeoutError.

Owns which failures of ranks say the same, and how several ranks are named. Pure.
"""

import pickle
from collections.abc import Mapping, Sequence
from typing import Any, Self

from prefect_torch_ddp.protocol.rank import Hang, RankFailure


def _rebuild(
    cls: type["PrefectTorchDdpError"], args: tuple[Any, ...], cause: bytes | None
) -> "PrefectTorchDdpError":
    error = cls(*args)
    if cause is not None:
        try:
            error.__cause__ = pickle.loads(cause)
        except Exception:  # noqa: BLE001 - the cause's class may not exist on this side; its text is in our message
            error.__cause__ = None
    return error


class PrefectTorchDdpError(Exception):
    """The base of all our errors. Survives pickle with its fields and its `__cause__`."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Carry the cause too, which pickle drops; a cause that can't be pickled is left out,
        its text is in the message.
        """
        cause = None
        if self.__cause__ is not None:
            try:
                cause = pickle.dumps(self.__cause__)
                pickle.loads(cause)
            except Exception:  # noqa: BLE001 - any class of the user's may refuse in any way
                cause = None
        return _rebuild, (type(self), self.args, cause)


class InvalidParamsError(PrefectTorchDdpError, ValueError):
    """A value given by the caller can't work; says which, why and what to do.

    Raised before any work starts.
    """


class NoImagesError(InvalidParamsError, FileNotFoundError):
    """A dataset has no class folder, or a class without images; a FileNotFoundError, as
    torchvision's is.
    """


class StorageError(PrefectTorchDdpError):
    """The storage can't do what was asked: names the object, the reason and the way out; shows
    no secret.
    """


class ObjectNotFoundError(StorageError):
    """There is no such object."""


class ObjectChangedError(StorageError):
    """The object isn't the one that was listed: another content stands under its name by
    now.
    """


class DamagedObjectError(StorageError):
    """The object's content isn't what was written, by the digest that was written with it, each
    time it was read.
    """


class BadKeyError(StorageError, ValueError):
    """A key would leave the storage's root or isn't portable."""


class CorruptImageError(PrefectTorchDdpError):
    """An object of a dataset was read whole and is no image that can be decoded; names it."""


class CheckpointError(PrefectTorchDdpError):
    """A checkpoint can't be written or restored; names the checkpoint and the object."""


class SupersededError(CheckpointError):
    """A newer attempt of the run has begun; this one must not change its checkpoints any more."""


class GangError(PrefectTorchDdpError):
    """A gang could not run to its end."""


class NotEnoughWorkersError(GangError):
    """The cluster has too few workers, or they stayed busy past the limit; says how many there
    are and how many are needed.
    """


class WorkerLostError(GangError):
    """A Dask worker that held ranks is gone; names the worker and its ranks."""


class SchedulerLostError(GangError):
    """The Dask scheduler is gone, or silent, and with it the way to the workers; ranks end by
    themselves within seconds.
    """


class GangCancelledError(GangError):
    """The gang was cancelled from outside while it ran; `step` and `checkpoint_step` where they
    are known.
    """

    def __init__(
        self, message: str, step: int | None = None, checkpoint_step: int | None = None
    ) -> None:
        """Keep what was lost and what is left.

        Args:
            message: by what.
            step: the step after which all ranks stopped.
            checkpoint_step: step of the run's newest checkpoint.
        """
        super().__init__(message, step, checkpoint_step)
        self.step = step
        self.checkpoint_step = checkpoint_step

    def __str__(self) -> str:
        """Say by what, after which step, and from which checkpoint it may go on."""
        text = str(self.args[0])
        if self.step is not None:
            text += f"; all ranks stopped after step {self.step}"
        if self.checkpoint_step is not None:
            text += f"; the newest checkpoint is of step {self.checkpoint_step}"
        return text


class GangHungError(GangError):
    """Ranks were alive and made no progress; the gang was stopped.

    Says who did not arrive, and where it is.
    """

    def __init__(self, hang: Hang, attempt: int) -> None:
        """Keep what was seen.

        Args:
            hang: who hung, where, and everybody's stacks.
            attempt: counts from 1.
        """
        super().__init__(hang, attempt)
        self.hang = hang
        self.attempt = attempt

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that did not arrive."""
        return self.hang.ranks

    @property
    def hosts(self) -> tuple[str, ...]:
        """Their hosts."""
        return self.hang.hosts

    @property
    def stacks(self) -> Mapping[int, str]:
        """The threads of each rank that answered."""
        return self.hang.stacks

    def __repr__(self) -> str:
        """Show the first line: Prefect writes it where it announces a retry."""
        return f"{type(self).__name__}({str(self).splitlines()[0]!r})"

    def __str__(self) -> str:
        """Say it in one line, then show the main thread of the first rank that did not
        arrive.
        """
        lines = [f"the gang hung in attempt {self.attempt}: {self.hang.summary}"]
        lines += [
            "if a step may take so long, raise progress_timeout_s, or call report_progress() meanwhile"
        ]
        if self.hang.ranks and (stack := self.hang.stacks.get(self.hang.ranks[0])):
            lines += [
                "",
                f"rank {self.hang.ranks[0]} is at (the innermost call first; all stacks are in the log):",
            ]
            lines += [
                f"  {line.strip()}"
                for line in stack.rstrip().rpartition("hread 0x")[2].splitlines()[1:]
            ]
        return "\n".join(lines)


class RankFailedError(GangError):
    """A rank failed and the gang was stopped.

    `__cause__` is the user's own exception where it can be rebuilt here.
    """

    def __init__(
        self,
        failure: RankFailure,
        attempt: int,
        collateral: Sequence[RankFailure] = (),
        why_final: str | None = None,
    ) -> None:
        """Keep the failure and its consequences.

        Args:
            failure: the root cause.
            attempt: counts from 1.
            collateral: failures of other ranks: equal ones, and those that followed from it.
            why_final: why another attempt would end in the same way, and none is made; None
                where one may go better.
        """
        super().__init__(failure, attempt, tuple(collateral), why_final)
        self.failure = failure
        self.attempt = attempt
        self.collateral = tuple(collateral)
        self.why_final = why_final

    def as_final(self, why: str) -> Self:
        """Return the same error, which also says why no other attempt is made."""
        error = type(self)(self.failure, self.attempt, self.collateral, why)
        error.__cause__ = self.__cause__
        return error

    @classmethod
    def from_failures(
        cls, failure: RankFailure, attempt: int, collateral: Sequence[RankFailure] = ()
    ) -> Self:
        """Build the error with the user's own exception as its cause, where that unpickles on
        this side.
        """
        error = cls(failure, attempt, collateral)
        if failure.exception_pickle is not None:
            try:
                error.__cause__ = pickle.loads(failure.exception_pickle)
            except Exception:  # noqa: BLE001 - class unknown here; type and text survive in the failure
                error.__cause__ = None
        return error

    @property
    def rank(self) -> int:
        """The rank that failed first."""
        return self.failure.rank

    @property
    def host(self) -> str:
        """The host it ran on."""
        return self.failure.host

    @property
    def exit_code(self) -> int | None:
        """Its exit code, where it left by one."""
        return self.failure.exit_code

    @property
    def signal(self) -> int | None:
        """The signal that killed it, where one did."""
        return self.failure.signal

    @property
    def traceback_text(self) -> str:
        """The traceback as the rank formatted it, empty where there is none."""
        return self.failure.traceback_text

    def __repr__(self) -> str:
        """Show the first line: Prefect writes it where it announces a retry."""
        return f"{type(self).__name__}({str(self).splitlines()[0]!r})"

    def __str__(self) -> str:
        """Say who, where, which attempt and why; then the rank's traceback and what followed
        from it.
        """
        first = self.failure
        equal, others = split_equal(first, self.collateral)
        lines = [f"{name_ranks([first, *equal])} failed in attempt {self.attempt}: {first.summary}"]
        if self.why_final:
            lines += [f"not tried again: {self.why_final}"]
        if first.traceback_text:
            lines += ["", first.traceback_text.rstrip()]
        if first.stderr_tail:
            lines += [
                "",
                f"last lines on stderr of rank {first.rank}:",
                *(f"  {line}" for line in first.stderr_tail),
            ]
        if others:
            lines += ["", "as a consequence:"]
            lines += [
                f"  {name_ranks(group)}: {group[0].summary.splitlines()[0]}"
                for group in groups_of_equals(others)
            ]
        return "\n".join(lines)


def groups_of_equals(failures: Sequence[RankFailure]) -> list[list[RankFailure]]:
    """Put failures together that say the same; in the order in which each was seen first."""
    groups: dict[tuple[str, str, bool], list[RankFailure]] = {}
    for failure in failures:
        groups.setdefault((failure.kind, failure.summary, failure.is_collateral), []).append(
            failure
        )
    return list(groups.values())


def split_equal(
    cause: RankFailure, others: Sequence[RankFailure]
) -> tuple[list[RankFailure], list[RankFailure]]:
    """Part the other ranks' failures into those that say the same as the cause and the rest."""
    together = next(group for group in groups_of_equals([cause, *others]) if group[0] is cause)
    return together[1:], [
        failure for failure in others if all(failure is not one for one in together)
    ]


def name_ranks(failures: Sequence[RankFailure]) -> str:
    """Name ranks with their hosts: `rank 1 on b`, or `ranks 0, 1 on a, 2 on b`."""
    by_host: dict[str, list[int]] = {}
    for failure in sorted(failures, key=lambda failure: failure.rank):
        by_host.setdefault(failure.host, []).append(failure.rank)
    places = ", ".join(f"{', '.join(map(str, ranks))} on {host}" for host, ranks in by_host.items())
    return f"{'rank' if len(failures) == 1 else 'ranks'} {places}"
