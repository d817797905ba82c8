"""How ranks come to a checkpoint without a collective: a key-value store, and reports in it.

Each rank reports what it wrote of a checkpoint. Rank 0 compares the reports before it commits.
"""

import itertools
import json
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist

from prefect_torch_ddp.checkpoint.attempts import refuse_superseded
from prefect_torch_ddp.checkpoint.keys import checkpoint_prefix
from prefect_torch_ddp.checkpoint.manifest import Manifest
from prefect_torch_ddp.checkpoint.shard import Layout, Shard, uncovered
from prefect_torch_ddp.errors import CheckpointError, InvalidParamsError
from prefect_torch_ddp.storage.protocol import Storage

POLL_S = 0.01
MAX_POLL_S = 0.2
ABSENT_S = 300.0
"""How long rank 0 waits for a rank that hasn't begun the same checkpoint; a step is usual."""
LOOK_S = 30.0
"""For how long rank 0 looks for what other ranks wrote: a network's folder may show it late."""

RankMetrics = Mapping[str, tuple[float, tuple[int, int], int]]
"""A rank's newest value of each metric, the interval between checkpoints in which it was reported,
and its weight: the samples of that step, or 0."""
Report = Mapping[str, Any]
"""A rank's `host`, the names `tracked` there, the `objects` that it wrote, its `error` or None; its
`metrics`, and what its `replicas` are compared by."""

_num_rank_stores = itertools.count()


class KeyValueStore:
    """Texts by key, in a torch store that all ranks of a gang reach."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store

    def set(self, key: str, text: str) -> None:
        """Set a value."""
        self._store.set(key, text)

    def get(self, key: str) -> str | None:
        """Return a value, None if there is none yet; doesn't wait."""
        return self._store.get(key).decode() if self._store.check([key]) else None

    def drop(self, key: str) -> None:
        """Forget a value."""
        self._store.delete_key(key)

    def wait_for(
        self, key: str, rank: int, is_over: Callable[[], bool] = lambda: False
    ) -> str | None:
        """Wait for a value that a rank sets; None if it won't: it set `gone`, or `is_over`.

        A rank that dies ends the whole gang, so there is no time limit.
        """
        pause_s = POLL_S
        while True:
            no_more = self.get(f"gone/{rank}") is not None or is_over()
            # Asked after that: what was set before the end counts.
            if (text := self.get(key)) is not None or no_more:
                return text
            threading.Event().wait(pause_s)
            pause_s = min(1.5 * pause_s, MAX_POLL_S)


def open_rank_store(world_size: int) -> KeyValueStore:
    """Return the store of this process's gang; every rank has to open it equally often.

    Raises:
        RuntimeError: there are several ranks and the process group isn't up.
    """
    if world_size == 1:
        return KeyValueStore(dist.HashStore())
    if not dist.is_initialized():
        msg = "ctx.track on several ranks needs the process group; call init_process_group first"
        raise RuntimeError(msg)
    # Torch has no public way to it.
    store = dist.distributed_c10d._get_default_store()  # noqa: SLF001
    prefix = f"prefect-torch-ddp-checkpoints-{next(_num_rank_stores)}"
    # Its own connection: the process group's is held by those who wait for it.
    return KeyValueStore(dist.PrefixStore(prefix, store.clone()))


def wait_for_report(
    rank_store: KeyValueStore, rank: int, turn: int, *, is_last: bool
) -> dict[str, Any]:
    """Return what a rank wrote of a checkpoint; turns grow, the same way on all ranks.

    Raises:
        InvalidParamsError: it takes no part in it: it is past it, at its end, or doesn't come.
    """
    ends_at = time.monotonic() + ABSENT_S

    def is_over() -> bool:
        begun = int(rank_store.get(f"begun/{rank}") or -1)
        has_ended = rank_store.get(f"ended/{rank}") is not None and not is_last
        return begun > turn or (begun < turn and (has_ended or time.monotonic() > ends_at))

    text = rank_store.wait_for(f"written/{turn}/{rank}", rank, is_over)
    if text is None:
        msg = (
            f"rank {rank} took no part in the checkpoint; call ctx.track and ctx.checkpoint on "
            "every rank, at the same step"
        )
        raise InvalidParamsError(msg)
    rank_store.drop(f"written/{turn}/{rank}")  # or a long training would keep all of them
    report: dict[str, Any] = json.loads(text)
    return report


def check_reports(reports: Sequence[Report]) -> None:
    """Refuse different objects by InvalidParamsError, and a rank that failed by CheckpointError."""
    # The objects are shared out by their order.
    names = reports[0]["tracked"]
    for rank, report in enumerate(reports):
        if report["tracked"] != names:
            msg = (
                f"the ranks track different objects: rank 0 {', '.join(names)}; rank {rank} "
                f"{', '.join(report['tracked'])}; call ctx.track with the same names in one order "
                "on every rank, also for what only rank 0 uses, such as averaged weights"
            )
            raise InvalidParamsError(msg)
        if report["error"]:
            msg = f"rank {rank}: {report['error']}"
            raise CheckpointError(msg)
    # Of a folder's files several ranks may commit the same one.
    shards = (
        Shard(item["object"], Layout(item["layout"]), item["rank"])
        for report in reports
        for item in report["objects"]
        if item["path"] is None
    )
    if found := uncovered(names, shards, len(reports)):
        name, fault = found
        msg = (
            f"the tracked object {name!r} differs between the ranks ({fault}): it has buffers on "
            "some of them only, or ctx.track on some and ctx.track_each on others; build and track "
            "it the same way on every rank"
        )
        raise InvalidParamsError(msg)


def mean_metrics(
    reports: Sequence[Report],
) -> tuple[dict[str, float], dict[str, tuple[int, int]]]:
    """Return each metric's mean over the ranks that reported it last, and when that was.

    By samples, if some are known; otherwise each rank counts the same, as `read_metrics` has it.
    """
    values: dict[str, float] = {}
    intervals: dict[str, tuple[int, int]] = {}
    for name in dict.fromkeys(name for report in reports for name in report["metrics"]):
        found = [report["metrics"][name] for report in reports if name in report["metrics"]]
        last = intervals[name] = max(tuple(interval) for _value, interval, _weight in found)
        of_last = [(value, weight) for value, interval, weight in found if tuple(interval) == last]
        if not any(weight for _, weight in of_last):
            of_last = [(value, 1) for value, _ in of_last]
        terms = [(value, weight) for value, weight in of_last if weight]
        if len({value for value, _ in terms}) == 1:
            values[name] = terms[0][0]  # not another one by a rounding
        else:
            total = sum(weight for _, weight in terms)
            values[name] = sum(value * weight for value, weight in terms) / total
    return values, intervals


def refuse_unshared(storage: Storage, manifest: Manifest, reports: Sequence[Report]) -> None:
    """Raise InvalidParamsError if rank 0 doesn't find what other ranks wrote, by name and size.

    Or SupersededError: a newer attempt has begun, which deletes what this one wrote.
    """
    prefix = checkpoint_prefix(manifest.run_id, manifest.step, manifest.attempt)
    ends_at = time.monotonic() + LOOK_S
    while True:
        there = {(found.key, found.num_bytes) for found in storage.list(prefix)}
        lacking = [
            f"rank {rank} on {report['host']}"
            for rank, report in enumerate(reports)
            if {(item["key"], item["num_bytes"]) for item in report["objects"]} - there
        ]
        if not lacking:
            return
        refuse_superseded(storage, manifest.run_id, manifest.attempt)
        if time.monotonic() > ends_at:
            msg = (
                f"the hosts don't share the storage {storage.uri}: rank 0 on "
                f"{socket.gethostname()} doesn't find there what was written by "
                f"{', '.join(lacking[:8])}{', ...' if lacking[8:] else ''}; use a folder that all "
                "hosts mount under this path, or s3://bucket/prefix"
            )
            raise InvalidParamsError(msg)
        threading.Event().wait(LOOK_S / 30)
