"""Owns the drawing of seeded kill points, and the check that after each of them nothing is lost and nothing is there twice."""

import itertools
import json
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import pytest
from distributed import Client

from prefect_torch_ddp import RankFailedError, run_gang
from prefect_torch_ddp.checkpoint.keys import checkpoints_prefix, manifest_key
from prefect_torch_ddp.checkpoint.manifest import list_manifests
from prefect_torch_ddp.metrics.read import loss_curve, read_records
from prefect_torch_ddp.rank.config import CheckpointPolicy, RankConfig
from prefect_torch_ddp.storage.directory import DirectoryStorage
from prefect_torch_ddp.storage.protocol import Storage
from prefect_torch_ddp.storage.s3 import S3Storage
from prefect_torch_ddp.storage.s3_client import client_of
from prefect_torch_ddp.tasks.run_journal import RunJournal
from tests.integration.s3_server import S3Server
from tests.killing_wire import KillingWire, WireKill
from tests.workloads import killed
from tests.workloads.killed import BATCH, EPOCHS, NUM_SAMPLES, NUM_STEPS, SAVE_EVERY, Kill, KillingStorage, Plan

Backend = Literal["directory", "s3"]
BACKENDS: tuple[Backend, ...] = ("directory", "s3")
RUN_WITH_CONTEXT = "prefect_torch_ddp.rank.entry:run_with_context"
RESUMABLE_FROM = 6
"""A rank in this step knows that a checkpoint is on record: rank 0 has begun the second one."""
NUM_OBJECTS = 6
"""Of a checkpoint of two ranks: model, optimizer, scheduler, ballast, and two of random generators."""
LAST = rf"step-{NUM_STEPS:08d}/"


def seed_from_environment() -> int:
    """Return the seed of this run: PTD_KILL_SEED, else always the same."""
    return int(os.environ.get("PTD_KILL_SEED", "20261121"))


@dataclass(frozen=True)
class KillPoint:
    """A training, and where its attempts are killed; the attempt after the last kill ends it."""

    name: str
    backend: Backend
    kills: tuple[Kill, ...] = ()
    wire_kills: tuple[WireKill, ...] = ()
    sizes: tuple[int, ...] = (2, 2)
    """The number of ranks of each attempt. Where they differ, each attempt is a call of its own, as Prefect's retries are."""
    plan: Plan = field(default_factory=lambda: Plan(""))

    @property
    def num_kills(self) -> int:
        """How many attempts are killed."""
        return len(self.sizes) - 1


# ---- The drawing.


def every_kill_point(seed: int) -> list[KillPoint]:
    """Draw the kill points: each kind on a directory and on S3, those of file systems and of wires where they belong."""
    chance = random.Random(seed)
    points: list[KillPoint] = []
    for backend in BACKENDS:
        kinds = [
            *_in_training(chance),
            *_while_saving(chance),
            *_while_cleaning(chance),
            *_after_a_restart(chance),
            *_at_the_end(chance),
            *_within_calls_of_a_file_system(chance),
        ]
        points += [replace(point, name=f"{point.name}-{backend}", backend=backend) for point in kinds if _fits(point, backend)]
        points += [_with_other_sizes(chance, backend, sizes) for sizes in ((4, 2, 1, 4), (1, 2), (2, 4, 1))]
    points += _on_the_wire(chance)
    return [replace(point, name=f"{seed}-{number:03d}-{point.name}") for number, point in enumerate(points)]


def _fits(point: KillPoint, backend: Backend) -> bool:
    return backend == "directory" or all(kill.moment in ("before", "after") for kill in point.kills)


def _point(name: str, *kills: Kill, size: int = 2, **plan: Any) -> KillPoint:
    return KillPoint(name, "directory", kills, sizes=(size,) * (len(kills) + 1), plan=Plan("", **plan))


def _any_plan(chance: random.Random) -> dict[str, Any]:
    return {"accumulates": chance.random() < 0.4, "num_workers": chance.choice([0, 0, 0, 2])}


def _in_training(chance: random.Random) -> Iterator[KillPoint]:
    """In the loop's body, in the middle of an accumulation, at any moment, in a DataLoader's worker."""
    for place in ("begin", "backward", "end"):
        size = chance.choice([1, 2, 4])
        kill = Kill(1, place, rank=chance.randrange(size), step=chance.randrange(1, NUM_STEPS + 1))
        yield _point(f"mid-epoch-{place}", kill, size=size, **_any_plan(chance))
    kill = Kill(1, "micro_batch", rank=chance.randrange(2), step=chance.choice([s for s in range(2, NUM_STEPS) if s % 5]))
    yield _point("mid-accumulation", kill, accumulates=True)
    for _ in range(2):
        kill = Kill(1, "timer", rank=chance.randrange(2), step=chance.randrange(1, 13), delay_s=chance.uniform(0, 0.03))
        yield _point("any-moment", kill, **_any_plan(chance))
    yield _point("data-worker", Kill(1, "data_worker", rank=chance.randrange(2), nth=chance.randrange(1, 7)), num_workers=2)


def _while_saving(chance: random.Random) -> Iterator[KillPoint]:
    """While the state is copied, around the objects' and the records' writes, around the commit."""
    yield _point("mid-copy", Kill(1, "staging", nth=chance.randrange(1, 6)), **_any_plan(chance))
    for rank, moment in itertools.product(range(2), ("before", "torn", "within", "after")):
        kill = Kill(1, "write", rank=rank, key=r"(model|optimizer|rank-\d+)\.pt$", moment=moment, nth=chance.randrange(1, 9))
        yield _point(f"mid-save-{moment}-on-{rank}", kill, **_any_plan(chance))
    for moment in ("before", "within", "after"):
        kill = Kill(1, "write_if_absent", rank=1, key="/metrics/", moment=moment, nth=chance.randrange(1, 5))
        yield _point(f"mid-flush-{moment}", kill)
    for moment in ("before", "torn", "within", "after"):
        kill = Kill(1, "write_if_absent", key=r"manifest\.json$", moment=moment, nth=chance.randrange(1, 6))
        yield _point(f"mid-commit-{moment}", kill, **_any_plan(chance))


def _while_cleaning(chance: random.Random) -> Iterator[KillPoint]:
    """Between a commit and the deletes that follow it, and between these."""
    for nth in (1, 2, chance.randrange(3, NUM_OBJECTS + 1), NUM_OBJECTS + 1):
        moment = chance.choice(["before", "after"])
        kill = Kill(1, "delete", moment=moment, nth=nth + chance.choice([0, NUM_OBJECTS + 1]))
        yield _point(f"retention-{nth}-{moment}", kill)
    yield _point("retention-within", Kill(1, "delete", moment="within", nth=chance.randrange(1, NUM_OBJECTS + 2)))


def _after_a_restart(chance: random.Random) -> Iterator[KillPoint]:
    """The second attempt is killed as well: while it looks, reads, restores, in its first step, while it sweeps."""

    def first() -> Kill:
        return Kill(1, "backward", rank=chance.randrange(2), step=chance.randrange(RESUMABLE_FROM, NUM_STEPS))

    for rank in range(2):
        kill = Kill(2, "read", rank=rank, key=r"\.pt$", moment=chance.choice(["before", "after"]), nth=chance.randrange(1, 5))
        yield _point(f"restart-reads-on-{rank}", first(), kill)
    yield _point("restart-looks", first(), Kill(2, "read", key=r"manifest\.json$", moment=chance.choice(["before", "after"])))
    yield _point("restart-restores", first(), Kill(2, "restoring", rank=chance.randrange(2)))
    yield _point("restart-tracked", first(), Kill(2, "tracked", rank=chance.randrange(2)), **_any_plan(chance))
    for place in ("begin", "end"):
        yield _point(f"restart-first-step-{place}", first(), Kill(2, place, rank=chance.randrange(2)), **_any_plan(chance))
    left = Kill(1, "write", rank=chance.randrange(2), key=r"\.pt$", moment="after", nth=chance.randrange(4, 10))
    for moment in ("before", "after"):
        yield _point(f"restart-sweeps-{moment}", left, Kill(2, "delete", key="/000001/", moment=moment))
    third = Kill(3, "write_if_absent", key=r"manifest\.json$", moment="after")
    yield _point("three-restarts", first(), Kill(2, "write", key=r"\.pt$", moment="after", nth=2), third)


def _at_the_end(chance: random.Random) -> Iterator[KillPoint]:
    """After the loop, and while the last checkpoint is written."""
    yield _point("loop-left", Kill(1, "left", rank=chance.randrange(2)))
    for rank in range(2):
        kill = Kill(1, "write", rank=rank, key=LAST, moment=chance.choice(["before", "after"]), nth=chance.randrange(1, 4))
        yield _point(f"last-save-on-{rank}", kill, **_any_plan(chance))
    for moment in ("before", "after"):
        kill = Kill(1, "write_if_absent", key=f"{LAST}manifest", moment=moment)
        yield _point(f"last-commit-{moment}", kill, **_any_plan(chance))
    gone = rf"step-{(NUM_STEPS - 3) // SAVE_EVERY * SAVE_EVERY:08d}/"
    nth = chance.randrange(1, NUM_OBJECTS + 1)
    yield _point("last-retention", Kill(1, "delete", key=gone, moment="after", nth=nth))


def _within_calls_of_a_file_system(chance: random.Random) -> Iterator[KillPoint]:
    """Within a call of the second attempt, too."""
    first = Kill(1, "end", rank=chance.randrange(2), step=chance.randrange(RESUMABLE_FROM, NUM_STEPS))
    for place, key in (("write", r"\.pt$"), ("write_if_absent", r"manifest\.json$"), ("delete", "")):
        yield _point(f"restart-within-{place}", first, Kill(2, place, key=key, moment="within"))


def _with_other_sizes(chance: random.Random, backend: Backend, sizes: tuple[int, ...]) -> KillPoint:
    """Each attempt has another number of ranks, and gets further than the one before."""
    steps = [5 + 4 * number - chance.randrange(2) for number in range(len(sizes) - 1)]
    kills = tuple(
        Kill(number, chance.choice(["begin", "backward", "end"]), rank=chance.randrange(size), step=step)
        for number, (size, step) in enumerate(zip(sizes, steps, strict=False), start=1)
    )
    plan = Plan("", accumulates=chance.random() < 0.5, num_workers=chance.choice([0, 0, 2]), is_elastic=True)
    return KillPoint(f"sizes-{'-'.join(map(str, sizes))}-{backend}", backend, kills, sizes=sizes, plan=plan)


def _on_the_wire(chance: random.Random) -> Iterator[KillPoint]:
    """Requests to S3 that are broken off, or done without the client ever hearing of it; uploads in parts."""
    requests: list[tuple[str, str, str, int, bool]] = [
        ("object-on-0", "PUT", r"model\.pt", 5, False),
        ("object-on-1", "PUT", r"rank-00001\.pt", 5, False),
        ("metrics", "PUT", "/metrics/", 4, False),
        ("manifest", "PUT", r"manifest\.json", 5, False),
        ("delete-manifest", "DELETE", r"manifest\.json", 4, False),
        ("delete-object", "DELETE", r"\.pt", NUM_OBJECTS, False),
        ("upload-begins", "POST", "uploads", 3, True),
        ("upload-part", "PUT", "partNumber=", 6, True),
        ("upload-ends", "POST", "uploadId=", 3, True),
    ]
    for name, method, path, num, is_big in requests:
        for moment in ("within", "after"):
            if moment == "within" and (method == "DELETE" or name == "upload-begins"):
                continue  # no body to break off
            kill = WireKill(1, method, path, moment, nth=chance.randrange(1, num + 1))
            plan = Plan("", is_big=is_big, accumulates=chance.random() < 0.3)
            yield KillPoint(f"wire-{name}-{moment}", "s3", wire_kills=(kill,), plan=plan)
    first = Kill(1, "end", rank=chance.randrange(2), step=chance.randrange(RESUMABLE_FROM, NUM_STEPS))
    read = WireKill(2, "GET", r"model\.pt", "after")
    yield KillPoint("wire-restart-reads", "s3", (first,), (read,), sizes=(2, 2, 2))


def ids(points: Sequence[KillPoint]) -> list[str]:
    """Return the names, by which pytest's -k finds a point again."""
    return [point.name for point in points]


def sample(points: Sequence[KillPoint], kinds: Sequence[str]) -> list[KillPoint]:
    """Choose the first point of each kind."""
    return [next(point for point in points if f"-{kind}" in point.name) for kind in kinds]


# ---- The run.


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
            policy = CheckpointPolicy(every_steps=SAVE_EVERY, every_s=None)
            where = KillingStorage(for_ranks, kills, str(folder))
            return RankConfig("run", attempt, "task", where, checkpoint=policy), killed.train, (plan,)

        def call(size: int, max_restarts: int) -> list[dict[str, Any]]:
            journal = RunJournal(storage, "run", knows_steps=True)
            options = {"world_size": size, "ranks_per_worker": max(1, size // 2), "max_restarts": max_restarts}
            return run_gang(client, RUN_WITH_CONTEXT, args=arguments, journal=journal, **options)

        if len(set(point.sizes)) == 1:
            return Ended(call(point.sizes[0], point.num_kills), storage, folder)
        for size in point.sizes[:-1]:
            with pytest.raises(RankFailedError, match="SIGKILL"):
                call(size, 0)
        return Ended(call(point.sizes[-1], 0), storage, folder)


_undisturbed: dict[tuple[Plan, int], Ended] = {}


def undisturbed(client: Client, point: KillPoint, new_folder: Callable[[], Path]) -> Ended:
    """Return what the same training leaves when nothing happens; for other numbers of ranks, that of one."""
    size = point.sizes[0] if len(set(point.sizes)) == 1 else 1
    plan = point.plan
    if (plan, size) not in _undisturbed:
        folder = new_folder()
        calm = KillPoint("undisturbed", "directory", sizes=(size,), plan=plan)
        _undisturbed[plan, size] = run(client, calm, DirectoryStorage(folder / "store"), folder)
    return _undisturbed[plan, size]


def strike(client: Client, point: KillPoint, server: S3Server | None, folder: Path, new_folder: Callable[[], Path]) -> None:
    """Run the training through its kills; assert that it ends as if there had been none.

    Args:
        client: of a cluster of two workers.
        point: what happens.
        server: for points on S3.
        folder: an empty one.
        new_folder: makes a folder that stays, for the undisturbed training.
    """
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
    _check_weights(point, ended, calm)
    _check_ledger(ended)
    _check_records(ended, calm)
    _check_checkpoints(ended, calm)


def _check_weights(point: KillPoint, ended: Ended, calm: Ended) -> None:
    assert {value["step"] for value in ended.values} == {NUM_STEPS}
    assert len({value["sha256_of_parameters"] for value in ended.values}) == 1
    if len(set(point.sizes)) == 1:
        assert ended.values[0]["sha256"] == calm.values[0]["sha256"]


def _check_ledger(ended: Ended) -> None:
    """Each sample once an epoch, in the batches that the order says, as the newest attempt that made each step wrote down."""
    from prefect_torch_ddp.data.sampler import GlobalBatches

    lines = [json.loads(line) for path in ended.folder.glob("ledger-*") for line in path.read_text().splitlines()]
    newest = {line["step"]: 0 for line in lines}
    for line in lines:
        newest[line["step"]] = max(newest[line["step"]], line["attempt"])
    found: dict[tuple[int, int], Counter[int]] = {}
    for line in lines:
        if line["attempt"] == newest[line["step"]]:
            found.setdefault((line["epoch"], line["step"]), Counter()).update(line["samples"])
    order = GlobalBatches(NUM_SAMPLES, BATCH)
    steps = [(epoch, batch) for epoch in range(EPOCHS) for batch in range(order.num_batches)]
    expected = {(epoch + 1, step): Counter(order.share(epoch, batch, 0, 1)) for step, (epoch, batch) in enumerate(steps, start=1)}
    assert found == expected, f"{found} is not {expected}"
    for epoch in range(1, EPOCHS + 1):
        seen = sum((samples for (e, _), samples in found.items() if e == epoch), Counter())
        assert seen == Counter(range(NUM_SAMPLES))


def _check_records(ended: Ended, calm: Ended) -> None:
    """No metric record is lost or there twice, and the loss is that of the undisturbed training."""
    records = read_records(ended.storage, "run")
    assert Counter(record.step for record in records if record.rank == 0) == Counter(range(1, NUM_STEPS + 1))
    curve, expected = loss_curve(records), loss_curve(read_records(calm.storage, "run"))
    assert [step for step, _ in curve] == list(range(1, NUM_STEPS + 1))
    assert [value for _, value in curve] == pytest.approx([value for _, value in expected], rel=1e-9)


def _check_checkpoints(ended: Ended, calm: Ended) -> None:
    """The same steps are kept, whole, and nothing else is left of any other: no object, no upload that was begun."""
    from prefect_torch_ddp.checkpoint.resume import find_resumable

    manifests = list_manifests(ended.storage, "run")
    steps, expected = ([m.step for m in found] for found in (manifests, list_manifests(calm.storage, "run")))
    assert steps == expected, f"kept are {steps}, not {expected}"
    newest = find_resumable(ended.storage, "run")
    assert newest is not None
    assert newest[0].step == NUM_STEPS
    kept = {item.key for manifest in manifests for item in manifest.objects}
    kept |= {manifest_key("run", manifest.step) for manifest in manifests}
    there = {found.key for found in ended.storage.list(checkpoints_prefix("run"))}
    assert there == kept, f"left over: {sorted(there - kept)}; missing: {sorted(kept - there)}"
    if isinstance(ended.storage, S3Storage):
        answer = client_of(ended.storage).list_multipart_uploads(Bucket=ended.storage.bucket, Prefix=ended.storage.prefix)
        begun = [upload["Key"] for upload in answer.get("Uploads", ())]
        assert not begun, f"uploads were begun and never ended: {begun}"
