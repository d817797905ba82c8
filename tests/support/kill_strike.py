"""A run through a kill point, and the check that nothing is lost and nothing is there twice."""

import json
import os
import re
import signal
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import psutil
import pytest
from distributed import Client

from prefect_torch_ddp import RankFailedError, run_gang
from prefect_torch_ddp.checkpoint.keys import checkpoints_prefix, manifest_key
from prefect_torch_ddp.checkpoint.manifest import list_manifests
from prefect_torch_ddp.params import CheckpointParams
from prefect_torch_ddp.rank.config import RankConfig
from prefect_torch_ddp.storage.directory import DirectoryStorage
from prefect_torch_ddp.storage.protocol import Storage
from prefect_torch_ddp.storage.s3.client import client_of
from prefect_torch_ddp.storage.s3.storage import S3Storage
from prefect_torch_ddp.tasks.report.curves import MetricCurves
from prefect_torch_ddp.tracking.attempt_log import RunAttemptLog
from tests.support.gangs import RUN_WITH_CONTEXT
from tests.support.kill_points import KillPoint
from tests.support.killing_storage import KillingStorage, WireKill, leave_mark
from tests.support.records import read_all_records, read_records
from tests.support.s3_server import S3Server, Wire, _Handler
from tests.workloads import killed
from tests.workloads.killed import BATCH, EPOCHS, NUM_SAMPLES, NUM_STEPS, SAVE_EVERY, Plan


@dataclass(frozen=True)
class Ended:
    """What a training left when it had ended."""

    values: list[dict[str, Any]]
    storage: Storage
    folder: Path


def run(client: Client, point: KillPoint, storage: Storage, folder: Path) -> Ended:
    """Train until an attempt ends; a restart or a retry follows each kill."""
    plan = replace(point.plan, folder=str(folder), kills=point.kills)
    with ExitStack() as stack:
        for_ranks = storage
        if point.wire_kills:
            assert isinstance(storage, S3Storage)
            wire = stack.enter_context(KillingWire(storage.endpoint_url, point.wire_kills, folder))
            for_ranks = replace(storage, endpoint_url=wire.endpoint_url)

        def arguments(attempt: int) -> tuple[Any, ...]:
            kills = tuple(kill for kill in point.kills if kill.attempt == attempt)
            policy = CheckpointParams(every_steps=SAVE_EVERY, every_s=None)
            where = KillingStorage(for_ranks, kills, str(folder))
            config = RankConfig("run", attempt, "task", where, checkpoint=policy, ledger=True)
            if plan.in_own_loop:
                on_demand = CheckpointParams(every_s=None)
                config = replace(config, checkpoint=on_demand, ledger=False)
                return config, killed.train_in_own_loop, (plan,)
            if plan.virtual_ranks is not None:
                config = replace(config, determinism="elastic", virtual_ranks=plan.virtual_ranks)
            return config, killed.train, (plan,)

        def call(size: int, max_restarts: int) -> list[dict[str, Any]]:
            log = RunAttemptLog(storage, "run", knows_steps=not plan.in_own_loop)
            options = {"world_size": size, "ranks_per_worker": max(1, size // 2)}
            options |= {"max_restarts": max_restarts}
            return run_gang(client, RUN_WITH_CONTEXT, args=arguments, attempt_log=log, **options)

        if len(set(point.sizes)) == 1:
            return Ended(call(point.sizes[0], point.num_kills), storage, folder)
        for size in point.sizes[:-1]:
            with pytest.raises(RankFailedError, match="SIGKILL"):
                call(size, 0)
        return Ended(call(point.sizes[-1], 0), storage, folder)


_undisturbed: dict[tuple[Plan, int], Ended] = {}


def undisturbed(client: Client, point: KillPoint, new_folder: Callable[[], Path]) -> Ended:
    """Return what the same training leaves when nothing happens; for other numbers of ranks,
    that of one."""
    size = point.sizes[0] if len(set(point.sizes)) == 1 else 1
    plan = point.plan
    if (plan, size) not in _undisturbed:
        folder = new_folder()
        calm = KillPoint("undisturbed", "directory", sizes=(size,), plan=plan)
        _undisturbed[plan, size] = run(client, calm, DirectoryStorage(folder / "store"), folder)
    return _undisturbed[plan, size]


def strike(
    client: Client,
    point: KillPoint,
    server: S3Server | None,
    folder: Path,
    new_folder: Callable[[], Path],
) -> None:
    """Run the training through its kills on a cluster of two workers, in an empty folder; assert
    that it ends as if there had been none, as in a new folder, which stays."""
    storage: Storage = DirectoryStorage(folder / "store")
    if point.backend == "s3":
        assert server is not None
        storage = server.storage()
    calm = undisturbed(client, point, new_folder)
    ended = run(client, point, storage, folder)
    carried_out = sorted(path.name for path in folder.glob("killed-*"))
    expected = [f"killed-{attempt}" for attempt in range(1, len(point.sizes))]
    assert carried_out == expected, f"a kill never came, or one too many: {carried_out}"
    assert {value["attempt"] for value in ended.values} == {len(point.sizes)}
    _check_checkpoints(ended, calm)
    if point.plan.in_own_loop:
        _check_own_loop(ended, calm)
        return
    _check_weights(point, ended, calm)
    _check_ledger(ended)
    _check_records(ended, calm)


def _check_weights(point: KillPoint, ended: Ended, calm: Ended) -> None:
    assert {value["step"] for value in ended.values} == {NUM_STEPS}
    assert len({value["sha256_of_parameters"] for value in ended.values}) == 1
    if len(set(point.sizes)) == 1 or point.plan.virtual_ranks is not None:
        assert ended.values[0]["sha256"] == calm.values[0]["sha256"]


def _check_ledger(ended: Ended) -> None:
    """Each sample once an epoch, in the batches that the order says: by the run's ledger, and
    by one that the workload kept."""
    from prefect_torch_ddp.data.sampler import GlobalBatches
    from prefect_torch_ddp.records.ledger import read_ledger

    lines = [
        json.loads(line)
        for path in ended.folder.glob("ledger-*")
        for line in path.read_text().splitlines()
    ]
    newest = {line["step"]: 0 for line in lines}
    for line in lines:
        newest[line["step"]] = max(newest[line["step"]], line["attempt"])
    found: dict[tuple[int, int], Counter[int]] = {}
    for line in lines:
        if line["attempt"] == newest[line["step"]]:
            found.setdefault((line["epoch"], line["step"]), Counter()).update(line["samples"])
    report = read_ledger(ended.storage, "run")
    assert report.is_clean, str(report)
    assert str(report).splitlines() == [
        f"epoch {epoch}: {NUM_SAMPLES} samples, each once" for epoch in range(1, EPOCHS + 1)
    ]
    order = GlobalBatches(NUM_SAMPLES, BATCH)
    steps = [(epoch, batch) for epoch in range(EPOCHS) for batch in range(order.num_batches)]
    expected = {
        (epoch + 1, step): Counter(order.share(epoch, batch, 0, 1))
        for step, (epoch, batch) in enumerate(steps, start=1)
    }
    assert found == expected, f"{found} is not {expected}"


def _check_records(ended: Ended, calm: Ended) -> None:
    """No metric record is lost or there twice, and the loss is that of the undisturbed
    training."""
    records = read_records(ended.storage, "run")
    assert [found.step for found in records if found.rank == 0] == list(range(1, NUM_STEPS + 1))
    curve, expected = (_curves(each)["loss"] for each in (ended, calm))
    assert [step for step, _ in curve] == list(range(1, NUM_STEPS + 1))
    assert [value for _, value in curve] == pytest.approx(
        [value for _, value in expected], rel=1e-9
    )


def _curves(ended: Ended) -> dict[str, list[tuple[float, float]]]:
    return MetricCurves(read_all_records(ended.storage, "run")).snapshot().values


def _check_own_loop(ended: Ended, calm: Ended) -> None:
    """The same bits on each rank, and each record once: the last round is not in a checkpoint."""
    digests = [[value["sha256"] for value in each.values] for each in (ended, calm)]
    assert digests[0] == digests[1]
    records = read_records(ended.storage, "run")
    assert [record.step for record in records if record.rank == 1] == [0, 0, 1, 1, 2, 2, 3, 3, 4]
    assert _curves(ended) == _curves(calm)


def _check_checkpoints(ended: Ended, calm: Ended) -> None:
    """The same steps are kept, whole, and nothing else is left of any other: no object, no
    upload that was begun."""
    from prefect_torch_ddp.checkpoint.restore import find_resumable

    manifests = list_manifests(ended.storage, "run")
    steps = [manifest.step for manifest in manifests]
    expected = [manifest.step for manifest in list_manifests(calm.storage, "run")]
    assert steps == expected, f"kept are {steps}, not {expected}"
    newest = find_resumable(ended.storage, "run")
    assert newest is not None
    assert newest[0].step == expected[-1]
    kept = {item.key for manifest in manifests for item in manifest.objects}
    kept |= {manifest_key("run", manifest.step, manifest.attempt) for manifest in manifests}
    there = {found.key for found in ended.storage.list(checkpoints_prefix("run"))}
    assert there == kept, f"left over: {sorted(there - kept)}; missing: {sorted(kept - there)}"
    if isinstance(ended.storage, S3Storage):
        answer = client_of(ended.storage).list_multipart_uploads(
            Bucket=ended.storage.bucket, Prefix=ended.storage.prefix
        )
        begun = [upload["Key"] for upload in answer.get("Uploads", ())]
        assert not begun, f"uploads were begun and never ended: {begun}"


class KillingWire(Wire):
    """A proxy in front of a server that kills its clients as told."""

    def __init__(self, endpoint_url: str, kills: tuple[WireKill, ...], folder: Path) -> None:
        super().__init__(endpoint_url)
        self._kills = kills
        self._folder = str(folder)
        self._num_seen: Counter[WireKill] = Counter()
        self._counting = threading.Lock()

    def due(self, handler: BaseHTTPRequestHandler) -> WireKill | None:
        """Count a request; return the kill whose turn it is."""
        for kill in self._kills:
            if handler.command == kill.method and re.search(kill.path, handler.path):
                with self._counting:
                    self._num_seen[kill] += 1
                    if self._num_seen[kill] == kill.nth:
                        return kill
        return None

    def carry_out(self, kill: WireKill, client: tuple[str, int]) -> None:
        """Kill the process at the other end of a connection."""
        for process in psutil.process_iter(["name"]):
            if (process.info["name"] or "").startswith("ddp-rank-") and client in _local_ends(
                process
            ):
                leave_mark(self._folder, kill.attempt)
                os.kill(process.pid, signal.SIGKILL)
                return
        msg = f"nobody is at the other end of {client}"
        raise AssertionError(msg)

    def _handler(self) -> type[_Handler]:
        return _KillingHandler


def _local_ends(process: psutil.Process) -> set[tuple[str, int]]:
    try:
        return {tuple(found.laddr) for found in process.net_connections("tcp")}
    except psutil.Error:
        return set()


class _KillingHandler(_Handler):
    wire: KillingWire

    def do_request_or_kill(self) -> None:
        kill = self.wire.due(self)
        if kill is None:
            self.do_request()
            return
        num_bytes = int(self.headers.get("Content-Length", 0))
        if kill.moment == "within":
            self.rfile.read(num_bytes // 2)
        else:
            self._forward(self.rfile.read(num_bytes))
        self.wire.carry_out(kill, self.client_address)
        self.close_connection = True

    do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = do_request_or_kill  # noqa: N815 - http.server's names
