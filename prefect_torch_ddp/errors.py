"""Every exception of the package. They cross processes by pickle, cause included.

None is a TimeoutError: user code and libraries catch those for their own reasons. The
module is long by its docstrings, of which each has an example.
"""

import pickle
from collections.abc import Sequence
from typing import Any, Self

from prefect_torch_ddp.frames import (
    innermost_frame,
    shorten_uncaught,
    users_frames,
    users_stacks,
    users_traceback,
)
from prefect_torch_ddp.lazy import exported_by
from prefect_torch_ddp.protocol.events import Hang, RankFailure


def _rebuild(
    cls: type["PrefectTorchDdpError"],
    args: tuple[Any, ...],
    cause: bytes | None,
    notes: Sequence[str] = (),
) -> "PrefectTorchDdpError":
    error = cls(*args)
    for note in notes:
        error.add_note(note)
    error.__cause__ = None if cause is None else _unpickle(cause)
    return error


def _unpickle(cause: bytes) -> BaseException | None:
    try:
        error: BaseException = pickle.loads(cause)
    except Exception:  # noqa: BLE001 - its class may not exist here; the message has its text
        return None
    return error


@exported_by("prefect_torch_ddp")
class PrefectTorchDdpError(Exception):
    """Base of the package's errors. Survives pickling with fields, notes and `__cause__`.

    Example:
        Catch whatever this package raises:

            from prefect_torch_ddp import PrefectTorchDdpError, read_goodput

            try:
                print(read_goodput("runs", "no-such-run").share)
            except PrefectTorchDdpError as error:
                print(f"{type(error).__name__}: {error}")
    """

    def __reduce__(self) -> tuple[Any, ...]:
        try:  # pickle drops it; one that can't be pickled is left out
            cause: bytes | None = pickle.dumps(self.__cause__)
            pickle.loads(cause or b"")
        except Exception:  # noqa: BLE001 - a user's class may refuse in any way
            cause = None
        return _rebuild, (type(self), self.args, cause, tuple(getattr(self, "__notes__", ())))

    def _render_traceback_(self) -> list[str]:
        """Return what IPython and Jupyter show of the error, which ask for this by its name."""
        return users_traceback(self).splitlines()


shorten_uncaught(PrefectTorchDdpError)


@exported_by("prefect_torch_ddp")
class InvalidParamsError(PrefectTorchDdpError, ValueError):
    """A given value is invalid. Raised before any work starts, if the value is known then.

    The message says which value, why, and what to give instead.

    Example:
        The message says what to write instead:

            from prefect_torch_ddp import InvalidParamsError, storage_from_uri

            try:
                storage_from_uri("ftp://host/runs")
            except InvalidParamsError as error:
                print(error)
    """


@exported_by("prefect_torch_ddp")
class NoImagesError(InvalidParamsError, FileNotFoundError):
    """A dataset has no class folder, or a class without images, as in torchvision.

    Example:
        A folder that has no class folders:

            from prefect_torch_ddp import NoImagesError, S3ImageFolder

            try:
                S3ImageFolder("runs/checkpoints")
            except NoImagesError as error:
                print(error)
    """


@exported_by("prefect_torch_ddp")
class StorageError(PrefectTorchDdpError):
    """An operation on the storage failed. The message names the object and the reason.

    Example:
        Check before a long job that its storage can be used:

            from prefect_torch_ddp import StorageError, storage_from_uri

            try:
                storage_from_uri("/proc/runs").check_writable()
            except StorageError as error:
                print(error)
    """


@exported_by("prefect_torch_ddp")
class ObjectNotFoundError(StorageError):
    """There is no such object.

    Example:
        A file that the ranks may not have saved yet:

            from prefect_torch_ddp import ObjectNotFoundError, read_result

            try:
                table = read_result("runs", run_id, "scores.csv")
            except ObjectNotFoundError:
                table = b""
    """


@exported_by("prefect_torch_ddp")
class ObjectChangedError(StorageError):
    """The object's content was replaced after it was listed.

    Example:
        Notice that a file was replaced after it was listed:

            from prefect_torch_ddp import ObjectChangedError, ObjectPart, storage_from_uri

            storage = storage_from_uri("notes")
            storage.write("a.txt", b"old")
            (listed,) = storage.list_objects("a.txt")
            storage.write("a.txt", b"new text")
            part = ObjectPart(listed.key, listed.num_bytes, etag=listed.etag)
            (content,) = storage.read_many([part])
            print(isinstance(content, ObjectChangedError))  # True
    """


@exported_by("prefect_torch_ddp")
class DamagedObjectError(StorageError):
    """The object's content doesn't match the digest written with it, however often it is read.

    Example:
        Find the damaged object of a source in a bucket, in a workload's `evaluate`:

            from prefect_torch_ddp import DamagedObjectError
            from prefect_torch_ddp.data import read_files

            try:
                sizes = {name: len(content) for name, content in read_files(ctx.source)}
            except DamagedObjectError as error:
                print(f"restore this file from a backup: {error}")
    """


@exported_by("prefect_torch_ddp")
class NewerFormatError(StorageError):
    """A stored file was written in a format of a later version of this package or of torch.

    The message names the file, its format, and what to install. Such a file is not damaged:
    nothing is used in its place, and neither it nor what it names is deleted. The same holds for a
    file whose format can't be understood, such as a text.

    Example:
        Read a run that a colleague's newer version may have written:

            from prefect_torch_ddp import NewerFormatError, read_ledger

            try:
                print(read_ledger("runs", run_id))
            except NewerFormatError as error:
                print(error)  # says which version to install
    """


class BadAnswerError(PrefectTorchDdpError):
    """A storage's answer doesn't match the request. Internal, since the request is repeated."""


class OtherObjectError(BadAnswerError):
    """The storage returned another object than the listed one, e.g. from a proxy. Internal."""


@exported_by("prefect_torch_ddp")
class BadKeyError(StorageError, ValueError):
    """A key leads outside of the storage's root or isn't portable.

    Example:
        A name that a user typed must not lead out of the storage:

            from prefect_torch_ddp import BadKeyError, read_result

            try:
                read_result("runs", run_id, "../../secret")
            except BadKeyError as error:
                print(error)
    """


@exported_by("prefect_torch_ddp")
class CorruptImageError(PrefectTorchDdpError):
    """An object was read completely but can't be decoded as an image. The message names it.

    Example:
        List the images that can't be decoded:

            from prefect_torch_ddp import CorruptImageError, S3ImageFolder

            images = S3ImageFolder(ctx.source)
            for number in range(len(images)):
                try:
                    images[number]
                except CorruptImageError as error:
                    print(error)
    """


@exported_by("prefect_torch_ddp")
class CheckpointError(PrefectTorchDdpError):
    """A checkpoint can't be written or restored.

    The message names the checkpoint, and the tracked object or stored file if only one is at fault.

    Example:
        A checkpoint that was deleted since it was listed:

            from prefect_torch_ddp import CheckpointError, evaluate_flow

            try:
                scores = evaluate_flow(report.checkpoint.uri)
            except CheckpointError as error:
                print(error)
    """


class ReplicasDifferError(CheckpointError):
    """The ranks' models differ. The message names the tracked object, the tensor and the ranks."""


class TrackerError(PrefectTorchDdpError):
    """A tracker such as MLflow doesn't answer, or refuses. The message names it and the reason."""


@exported_by("prefect_torch_ddp")
class SupersededError(CheckpointError):
    """A newer attempt of the run has begun, so this one may no longer change its checkpoints.

    Example:
        A rank may fail only because a newer attempt of its run trains:

            from prefect_torch_ddp import RankFailedError, SupersededError, run_gang

            try:
                run_gang(client, fn, world_size=2)
            except RankFailedError as error:
                if not isinstance(error.__cause__, SupersededError):
                    raise
    """


def is_superseded(error: BaseException | None) -> bool:
    """Tell whether a training ended only because a newer attempt of it has begun."""
    return isinstance(error, SupersededError) or (
        error is not None and isinstance(error.__cause__, SupersededError)
    )


class UnpicklableValueError(PrefectTorchDdpError, TypeError):
    """A rank returned a value that can't be pickled. The message names the rank and the type."""


@exported_by("prefect_torch_ddp")
class GangError(PrefectTorchDdpError):
    """A gang could not run to its end.

    Example:
        Catch whatever may end a gang, but no invalid argument:

            from prefect_torch_ddp import GangError, run_gang

            try:
                run_gang(client, fn, world_size=2)
            except GangError as error:
                print(error)
    """

    def in_brief(self) -> str:
        """Return the text for a log in which more attempts follow."""
        return str(self)


@exported_by("prefect_torch_ddp")
class NotEnoughWorkersError(GangError):
    """The cluster has too few workers, or they stayed busy.

    The message says how many workers there are and how many are needed, or that there are none.

    Example:
        Use fewer ranks if the cluster is small:

            from prefect_torch_ddp import NotEnoughWorkersError, run_gang

            try:
                values = run_gang(client, fn, world_size=64, workers_timeout_s=1)
            except NotEnoughWorkersError:
                values = run_gang(client, fn, world_size=2)
    """


@exported_by("prefect_torch_ddp")
class VersionConflictError(GangError):
    """Caller and workers, or two workers, have incompatible versions of a package.

    The message names the package, the versions and who has them.

    Example:
        Tell the user to make the environments equal:

            from prefect_torch_ddp import VersionConflictError, run_gang

            try:
                run_gang(client, fn, world_size=2)
            except VersionConflictError as error:
                raise SystemExit(f"install the same versions everywhere: {error}")
    """


@exported_by("prefect_torch_ddp")
class WorkerLostError(GangError):
    """A Dask worker that ran ranks is gone. The message names the worker and its ranks.

    If the worker left gracefully (retired, scaled down, at its lifetime or by SIGTERM) and the
    ranks could save, all of them stopped and saved after step `saved_step`, and the loss uses up no
    restart. Otherwise `saved_step` is None, for example for a function without a RankContext.

    Example:
        Was the work saved before the worker left?

            from prefect_torch_ddp import WorkerLostError, run_gang

            try:
                run_gang(client, fn, world_size=2)
            except WorkerLostError as error:
                print(error, "saved after step", error.saved_step)
    """

    def __init__(self, message: str, saved_step: int | None = None) -> None:
        """Keep what was saved."""
        super().__init__(message, saved_step)
        self.saved_step = saved_step

    def __str__(self) -> str:
        return str(self.args[0])


class SupervisorLostError(WorkerLostError):
    """The Dask worker that ran a task is gone or doesn't answer; the task itself can't retry."""


@exported_by("prefect_torch_ddp")
class SchedulerLostError(GangError):
    """The Dask scheduler is gone or doesn't answer; ranks end by themselves within seconds.

    Example:
        Connect to the scheduler's successor, and run the gang again:

            from distributed import Client
            from prefect_torch_ddp import SchedulerLostError, run_gang

            try:
                run_gang(client, fn, world_size=2)
            except SchedulerLostError:
                client = Client(scheduler_file="scheduler.json")
                run_gang(client, fn, world_size=2)
    """


class SchedulerUnresponsiveError(SchedulerLostError):
    """The Dask scheduler doesn't answer, temporarily or permanently."""


class AgentRefusedError(GangError):
    """Dask ran an agent a second time, or on a restarted worker; training isn't run twice."""


class GangGrowsError(GangError):
    """All ranks stopped and saved, so that the gang continues with more. Never leaves `gang`."""


class AgentLostError(Exception):
    """An agent's worker is gone, or Dask dropped the agent. Never leaves `gang`."""


class NoAnswerError(Exception):
    """A worker or the scheduler can't be reached, maybe temporarily. Never leaves `gang`."""


class ForkServerUnavailableError(Exception):
    """Ranks can't be forked here now; the text says why. Never leaves `gang`."""


class ForkServerUnfitError(ForkServerUnavailableError):
    """The fork server's process can't be forked. Never leaves `gang`."""


class TaskCancelled(BaseException):
    """A task of the flow was cancelled, by the flow's end or from outside; says how it ended.

    It isn't an Exception, so that a flow's `except Exception` doesn't catch it.
    """


@exported_by("prefect_torch_ddp")
class GangCancelledError(GangError):
    """The gang was cancelled from outside while it ran.

    `step` is the step after which all ranks stopped; None if they were killed before they could, or
    weren't in `ctx.steps` or a loop that calls `ctx.due`. `checkpoint_step` is the step of the
    newest checkpoint; None if there is none, or if the ranks were killed before they could tell.

    Example:
        Where a cancelled training can continue:

            from prefect_torch_ddp import GangCancelledError, run_gang

            try:
                run_gang(client, fn, world_size=2)
            except GangCancelledError as error:
                print("stopped after step", error.step, "and saved step", error.checkpoint_step)
    """

    def __init__(
        self, message: str, step: int | None = None, checkpoint_step: int | None = None
    ) -> None:
        """Keep the step after which all ranks stopped, and the newest checkpoint's step."""
        super().__init__(message, step, checkpoint_step)
        self.step = step
        self.checkpoint_step = checkpoint_step

    def __str__(self) -> str:
        return "; ".join(filter(None, (str(self.args[0]), saved_by(self))))


def saved_by(error: GangCancelledError) -> str:
    """Say after which step a cancelled gang stopped, and what it saved; empty if it couldn't."""
    parts = []
    if error.step is not None:
        parts.append(f"all ranks stopped after step {error.step}")
    if error.checkpoint_step is not None:
        parts.append(f"the newest checkpoint is of step {error.checkpoint_step}")
    return "; ".join(parts)


@exported_by("prefect_torch_ddp")
class _LongError(GangError):
    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self).splitlines()[0]!r})"  # in Prefect's retry line


_LONG_STEPS = (
    "if a step may take so long, raise progress_timeout_s, or call report_progress() meanwhile"
)


@exported_by("prefect_torch_ddp")
class GangHungError(_LongError):
    """Ranks were alive but made no progress. The message says which ranks the others wait for.

    It also says where in the code these ranks are. `ranks` are their numbers and `hosts` their
    hosts. `stacks` has, by rank, the stacks of all threads of each rank that answered.

    Example:
        Write down where the late ranks are in the code:

            from pathlib import Path
            from prefect_torch_ddp import GangHungError, run_gang

            try:
                run_gang(client, fn, world_size=2, progress_timeout_s=60)
            except GangHungError as error:
                for rank, stack in error.stacks.items():
                    Path(f"rank-{rank}.txt").write_text(stack)
                print("late:", dict(zip(error.ranks, error.hosts)))
    """

    def __init__(self, hang: Hang, attempt: int) -> None:
        """Keep what was seen in an attempt; attempts count from 1."""
        super().__init__(hang, attempt)
        self.hang, self.attempt = hang, attempt
        self.ranks = hang.ranks
        self.hosts = hang.hosts
        self.stacks = hang.stacks

    def __str__(self) -> str:
        lines = [f"the gang hung in attempt {self.attempt}: {self.hang.summary}", _LONG_STEPS]
        if self.ranks and (stack := self.stacks.get(self.ranks[0])):
            where = "(the innermost call first; the log has the other ranks)"
            main_thread = users_stacks(stack).rpartition("hread 0x")[2].splitlines()[1:]
            lines += [
                "",
                f"rank {self.ranks[0]} is at {where}:",
                *(f"  {line.strip()}" for line in main_thread),
            ]
        return "\n".join(lines)

    def in_brief(self) -> str:
        """Return one line, which has the place too: the log has all stacks just before it."""
        return str(self).splitlines()[0]


@exported_by("prefect_torch_ddp")
class RankFailedError(_LongError):
    """A rank failed and the gang was stopped.

    `__cause__` is the user's own exception if it can be unpickled here. `rank` failed first, on
    `host`. It exited with `exit_code` or was killed by `signal`, unless these are None.
    `traceback_text` is its formatted traceback, empty if there is none. The error's text has only
    the frames of your own code, and says where the whole traceback is kept.

    Example:
        Which rank failed, and your own exception:

            from prefect_torch_ddp import RankFailedError, run_gang

            try:
                run_gang(client, "math:sqrt", (-1,), world_size=2)
            except RankFailedError as error:
                print(error.rank, error.host, repr(error.__cause__))  # 0 10.0.0.7 ValueError(...)
    """

    def __init__(
        self,
        failure: RankFailure,
        attempt: int,
        collateral: Sequence[RankFailure] = (),
        why_final: str | None = None,
    ) -> None:
        """Keep the root cause, the failures that followed, and why no other attempt is made."""
        super().__init__(failure, attempt, tuple(collateral), why_final)
        self.failure = failure
        self.attempt = attempt
        self.collateral = tuple(collateral)
        self.why_final = why_final
        self.rank = failure.rank
        self.host = failure.host
        self.exit_code = failure.exit_code
        self.signal = failure.signal
        self.traceback_text = failure.traceback_text

    def as_final(self, why: str) -> Self:
        """Return the same error, which also says why no other attempt is made."""
        error = type(self)(self.failure, self.attempt, self.collateral, why)
        error.__cause__ = self.__cause__
        return error

    @classmethod
    def from_failures(
        cls, failure: RankFailure, attempt: int, collateral: Sequence[RankFailure] = ()
    ) -> Self:
        """Build the error with the user's own exception as its cause, if it unpickles."""
        error = cls(failure, attempt, collateral)
        if failure.exception_pickle is not None:
            error.__cause__ = _unpickle(failure.exception_pickle)
        return error

    def __str__(self) -> str:
        return self._told(self._users_traceback(), self.failure.hint)

    def in_brief(self) -> str:
        """Return the text for a log in which more attempts follow: with only the innermost frame.

        Unless the traceback is kept nowhere else. The last error gives the hint.
        """
        if not self.failure.log_uri:
            return self._told(self._users_traceback())
        return self._told(innermost_frame(users_frames(self.traceback_text)))

    def _users_traceback(self) -> str:
        shown = users_frames(self.traceback_text.rstrip())
        return "\n" + shown if shown else ""

    def _told(self, shown: str, hint: str = "") -> str:
        first, whole = self.failure, self.traceback_text.rstrip()
        equal, *groups = _group_identical([first, *self.collateral])
        lines = [f"{_name_ranks(equal)} failed in attempt {self.attempt}: {first.summary}"]
        if hint:
            lines += [hint]
        if self.why_final:
            lines += [f"not tried again: {self.why_final}"]
        if shown:
            lines += [shown]
        if shown.lstrip("\n") != whole:
            lines += [f"the whole traceback: {first.log_uri or 'traceback_text of this error'}"]
        if first.stderr_tail:
            lines += ["", f"last lines on stderr of rank {first.rank}:"]
            lines += [f"  {line}" for line in first.stderr_tail]
        if groups:
            lines += ["", "as a consequence:"]
        for group in groups:
            lines += [f"  {_name_ranks(group)}: {group[0].summary.splitlines()[0]}"]
        return "\n".join(lines)


def _group_identical(failures: Sequence[RankFailure]) -> list[list[RankFailure]]:
    groups: dict[tuple[str, str, bool], list[RankFailure]] = {}
    for failure in failures:
        key = (failure.kind, failure.summary, failure.is_collateral)
        groups.setdefault(key, []).append(failure)
    return list(groups.values())


def _name_ranks(failures: Sequence[RankFailure]) -> str:
    """Name ranks with their hosts: `rank 1 on b`, or `ranks 0, 1 on a, 2 on b`."""
    by_host: dict[str, list[str]] = {}
    for failure in sorted(failures, key=lambda failure: failure.rank):
        by_host.setdefault(failure.host, []).append(str(failure.rank))
    named = ", ".join(f"{', '.join(ranks)} on {host}" for host, ranks in by_host.items())
    return f"{'rank' if len(failures) == 1 else 'ranks'} {named}"


COMES_BACK = (
    *(ImportError, SyntaxError, InvalidParamsError, NewerFormatError, SupersededError),
    UnpicklableValueError,
)
"""Errors that another attempt can't avoid, wherever they are raised.

One by SupersededError would even stop the newer attempt that runs in its place.
"""
