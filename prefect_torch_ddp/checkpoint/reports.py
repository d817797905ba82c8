"""The ranks' reports on a checkpoint, which rank 0 compares before it commits."""

import socket
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from prefect_torch_ddp.checkpoint.attempts import refuse_superseded
from prefect_torch_ddp.checkpoint.keys import object_key
from prefect_torch_ddp.checkpoint.manifest import Manifest
from prefect_torch_ddp.errors import CheckpointError, InvalidParamsError
from prefect_torch_ddp.storage.protocol import Storage

LOOK_S = 30.0
"""For how long rank 0 looks for what other ranks wrote: a network's folder may show it late."""
NUM_SHOWN = 8
"""How many ranks an error lists."""

Report = Mapping[str, Any]
"""What a rank did: its `host`, the names `tracked` there, the `objects` that it wrote, its `error`.
Of a rank that took no part only the last two."""


def check_reports(reports: Sequence[Report]) -> None:
    """Refuse what isn't a whole checkpoint.

    Raises:
        InvalidParamsError: the ranks track different objects; names them, and the ranks.
        CheckpointError: a rank failed, or took no part.
    """
    _refuse_unequal(reports)
    for rank, report in enumerate(reports):
        if report["error"]:
            msg = f"rank {rank}: {report['error']}"
            raise CheckpointError(msg)
    _refuse_incomplete(reports)


def refuse_unshared(storage: Storage, manifest: Manifest, reports: Sequence[Report]) -> None:
    """Refuse a storage where rank 0 doesn't find what the other ranks wrote, by names and sizes.

    Raises:
        InvalidParamsError: names the ranks, their hosts, and what to use instead.
        SupersededError: a newer attempt has begun, which deletes what this one wrote.
        StorageError: the storage can't be listed.
    """
    ends_at = time.monotonic() + LOOK_S
    while lacking := _lacking(storage, manifest, reports):
        refuse_superseded(storage, manifest.run_id, manifest.attempt)
        if time.monotonic() > ends_at:
            shown = lacking[:NUM_SHOWN]
            there = ", ".join(f"rank {rank} on {reports[rank]['host']}" for rank in shown)
            msg = (
                f"the hosts don't share the storage {storage.uri}: rank 0 on "
                f"{socket.gethostname()} doesn't find there what was written by {there}"
                f"{', ...' if len(lacking) > NUM_SHOWN else ''}; use a folder that all hosts "
                "mount under this path, or s3://bucket/prefix"
            )
            raise InvalidParamsError(msg)
        threading.Event().wait(LOOK_S / 30)


def _lacking(storage: Storage, manifest: Manifest, reports: Sequence[Report]) -> list[int]:
    folder = object_key(manifest.run_id, manifest.step, manifest.attempt, "").rpartition("/")[0]
    there = {found.key: found.num_bytes for found in storage.list(f"{folder}/")}
    return [
        rank
        for rank, report in enumerate(reports)
        if rank > 0
        and any(there.get(item["key"]) != item["num_bytes"] for item in report["objects"])
    ]


def _refuse_unequal(reports: Sequence[Report]) -> None:
    tracked = {
        rank: report["tracked"] for rank, report in enumerate(reports) if "tracked" in report
    }
    # The objects are shared out by their order.
    other = next((rank for rank, names in tracked.items() if names != tracked[0]), None)
    if other is None:
        return
    where: dict[str, list[int]] = {}
    for rank, names in tracked.items():
        for name in names:
            where.setdefault(name, []).append(rank)
    partial = [
        f"{name!r} only on {_name_ranks(ranks)}"
        for name, ranks in where.items()
        if len(ranks) < len(tracked)
    ]
    if partial:
        msg = (
            f"the ranks track different objects: {', '.join(partial)}; call ctx.track with the "
            "same names on every rank, also for what only rank 0 uses, such as averaged weights"
        )
    else:
        orders = (f"rank {rank} {', '.join(tracked[rank])}" for rank in (0, other))
        msg = f"the ranks track objects in different orders: {'; '.join(orders)}; use one order"
    raise InvalidParamsError(msg)


def _refuse_incomplete(reports: Sequence[Report]) -> None:
    written = Counter(item["name"] for report in reports for item in report["objects"])
    for name in reports[0]["tracked"]:
        if written[name] != 1:
            msg = (
                f"the tracked object {name!r} differs between the ranks: it has buffers on some "
                "of them only; build it alike on every rank"
            )
            raise InvalidParamsError(msg)


def _name_ranks(ranks: Iterable[int]) -> str:
    first, *rest = ranks
    if not rest:
        return f"rank {first}"
    shown = ", ".join(str(rank) for rank in (first, *rest[: NUM_SHOWN - 1]))
    return f"ranks {shown}{', ...' if len(rest) >= NUM_SHOWN else ''}"
