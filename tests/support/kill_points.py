"""The drawing of seeded kill points: where a training is killed, and what that training is
like."""

import itertools
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from tests.support.killing_storage import Kill
from tests.support.killing_wire import WireKill
from tests.workloads.killed import NUM_STEPS, SAVE_EVERY, Plan

Backend = Literal["directory", "s3"]
BACKENDS: tuple[Backend, ...] = ("directory", "s3")
RESUMABLE_FROM = 6
"""A rank in this step knows that a checkpoint is on record: rank 0 has begun the second one."""
NUM_OBJECTS = 6
"""Of a checkpoint of two ranks: model, optimizer, scheduler, ballast, and two of random
generators."""
LAST = rf"step-{NUM_STEPS:08d}/"


def seed_from_environment() -> int:
    """Return the seed of this run: PTD_SEED, else always the same."""
    return int(os.environ.get("PTD_SEED", "20261121"))


@dataclass(frozen=True)
class KillPoint:
    """A training, and where its attempts are killed; the attempt after the last kill ends
    it."""

    name: str
    backend: Backend
    kills: tuple[Kill, ...] = ()
    wire_kills: tuple[WireKill, ...] = ()
    sizes: tuple[int, ...] = (2, 2)
    """The number of ranks of each attempt.

    Where they differ, each attempt is a call of its own, as Prefect's retries are.
    """
    plan: Plan = field(default_factory=lambda: Plan(""))

    @property
    def num_kills(self) -> int:
        """How many attempts are killed."""
        return len(self.sizes) - 1


def every_kill_point(seed: int) -> list[KillPoint]:
    """Draw the kill points: each kind on a directory and on S3, those of file systems and of
    wires where they belong."""
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
        points += [
            replace(point, name=f"{point.name}-{backend}", backend=backend)
            for point in kinds
            if _fits(point, backend)
        ]
        points += [
            _with_other_sizes(chance, backend, sizes) for sizes in ((4, 2, 1, 4), (1, 2), (2, 4, 1))
        ]
        points.append(_to_the_last_bit(_with_other_sizes(chance, backend, (4, 2, 1, 4))))
    points += _on_the_wire(chance)
    return [
        replace(point, name=f"{seed}-{number:03d}-{point.name}")
        for number, point in enumerate(points)
    ]


def _fits(point: KillPoint, backend: Backend) -> bool:
    return backend == "directory" or all(kill.moment in ("before", "after") for kill in point.kills)


def _point(name: str, *kills: Kill, size: int = 2, **plan: Any) -> KillPoint:
    return KillPoint(
        name, "directory", kills, sizes=(size,) * (len(kills) + 1), plan=Plan("", **plan)
    )


def _any_plan(chance: random.Random) -> dict[str, Any]:
    return {"accumulates": chance.random() < 0.4, "num_workers": chance.choice([0, 0, 0, 2])}


def _in_training(chance: random.Random) -> Iterator[KillPoint]:
    """In the loop's body, in the middle of an accumulation, at any moment, in a DataLoader's
    worker."""
    for place in ("begin", "backward", "end"):
        size = chance.choice([1, 2, 4])
        kill = Kill(1, place, rank=chance.randrange(size), step=chance.randrange(1, NUM_STEPS + 1))
        yield _point(f"mid-epoch-{place}", kill, size=size, **_any_plan(chance))
    kill = Kill(
        1,
        "micro_batch",
        rank=chance.randrange(2),
        step=chance.choice([s for s in range(2, NUM_STEPS) if s % 5]),
    )
    yield _point("mid-accumulation", kill, accumulates=True)
    for _ in range(2):
        kill = Kill(
            1,
            "timer",
            rank=chance.randrange(2),
            step=chance.randrange(1, 13),
            delay_s=chance.uniform(0, 0.03),
        )
        yield _point("any-moment", kill, **_any_plan(chance))
    yield _point(
        "data-worker",
        Kill(1, "data_worker", rank=chance.randrange(2), nth=chance.randrange(1, 7)),
        num_workers=2,
    )


def _while_saving(chance: random.Random) -> Iterator[KillPoint]:
    """While the state is copied, around the objects' and the records' writes, around the
    commit."""
    yield _point("mid-copy", Kill(1, "staging", nth=chance.randrange(1, 6)), **_any_plan(chance))
    for rank, moment in itertools.product(range(2), ("before", "torn", "within", "after")):
        kill = Kill(
            1,
            "write",
            rank=rank,
            key=r"(model|optimizer|rank-\d+)\.pt$",
            moment=moment,
            nth=chance.randrange(1, 9),
        )
        yield _point(f"mid-save-{moment}-on-{rank}", kill, **_any_plan(chance))
    for moment in ("before", "within", "after"):
        kill = Kill(
            1, "write_if_absent", rank=1, key="/metrics/", moment=moment, nth=chance.randrange(1, 5)
        )
        yield _point(f"mid-flush-{moment}", kill)
    for moment in ("before", "torn", "within", "after"):
        kill = Kill(
            1, "write_if_absent", key=r"manifest\.json$", moment=moment, nth=chance.randrange(1, 6)
        )
        yield _point(f"mid-commit-{moment}", kill, **_any_plan(chance))


def _while_cleaning(chance: random.Random) -> Iterator[KillPoint]:
    """Between a commit and the deletes that follow it, and between these."""
    for nth in (1, 2, chance.randrange(3, NUM_OBJECTS + 1), NUM_OBJECTS + 1):
        moment = chance.choice(["before", "after"])
        kill = Kill(1, "delete", moment=moment, nth=nth + chance.choice([0, NUM_OBJECTS + 1]))
        yield _point(f"retention-{nth}-{moment}", kill)
    yield _point(
        "retention-within",
        Kill(1, "delete", moment="within", nth=chance.randrange(1, NUM_OBJECTS + 2)),
    )


def _after_a_restart(chance: random.Random) -> Iterator[KillPoint]:
    """The second attempt is killed as well: while it looks, reads, restores, in its first step,
    while it sweeps."""

    def first() -> Kill:
        return Kill(
            1,
            "backward",
            rank=chance.randrange(2),
            step=chance.randrange(RESUMABLE_FROM, NUM_STEPS),
        )

    for rank in range(2):
        kill = Kill(
            2,
            "read",
            rank=rank,
            key=r"\.pt$",
            moment=chance.choice(["before", "after"]),
            nth=chance.randrange(1, 5),
        )
        yield _point(f"restart-reads-on-{rank}", first(), kill)
    yield _point(
        "restart-looks",
        first(),
        Kill(2, "read", key=r"manifest\.json$", moment=chance.choice(["before", "after"])),
    )
    yield _point("restart-restores", first(), Kill(2, "restoring", rank=chance.randrange(2)))
    yield _point(
        "restart-tracked",
        first(),
        Kill(2, "tracked", rank=chance.randrange(2)),
        **_any_plan(chance),
    )
    for place in ("begin", "end"):
        yield _point(
            f"restart-first-step-{place}",
            first(),
            Kill(2, place, rank=chance.randrange(2)),
            **_any_plan(chance),
        )
    left = Kill(
        1,
        "write",
        rank=chance.randrange(2),
        key=r"\.pt$",
        moment="after",
        nth=chance.randrange(4, 10),
    )
    for moment in ("before", "after"):
        yield _point(
            f"restart-sweeps-{moment}", left, Kill(2, "delete", key="/000001/", moment=moment)
        )
    third = Kill(3, "write_if_absent", key=r"manifest\.json$", moment="after")
    yield _point(
        "three-restarts", first(), Kill(2, "write", key=r"\.pt$", moment="after", nth=2), third
    )


def _at_the_end(chance: random.Random) -> Iterator[KillPoint]:
    """After the loop, and while the last checkpoint is written."""
    yield _point("loop-left", Kill(1, "left", rank=chance.randrange(2)))
    for rank in range(2):
        kill = Kill(
            1,
            "write",
            rank=rank,
            key=LAST,
            moment=chance.choice(["before", "after"]),
            nth=chance.randrange(1, 4),
        )
        yield _point(f"last-save-on-{rank}", kill, **_any_plan(chance))
    for moment in ("before", "after"):
        kill = Kill(1, "write_if_absent", key=rf"{LAST}\d+/manifest", moment=moment)
        yield _point(f"last-commit-{moment}", kill, **_any_plan(chance))
    gone = rf"step-{(NUM_STEPS - 3) // SAVE_EVERY * SAVE_EVERY:08d}/"
    nth = chance.randrange(1, NUM_OBJECTS + 1)
    yield _point("last-retention", Kill(1, "delete", key=gone, moment="after", nth=nth))


def _within_calls_of_a_file_system(chance: random.Random) -> Iterator[KillPoint]:
    """Within a call of the second attempt, too."""
    first = Kill(
        1, "end", rank=chance.randrange(2), step=chance.randrange(RESUMABLE_FROM, NUM_STEPS)
    )
    for place, key in (
        ("write", r"\.pt$"),
        ("write_if_absent", r"manifest\.json$"),
        ("delete", ""),
    ):
        yield _point(f"restart-within-{place}", first, Kill(2, place, key=key, moment="within"))


def _with_other_sizes(chance: random.Random, backend: Backend, sizes: tuple[int, ...]) -> KillPoint:
    """Each attempt has another number of ranks, and gets further than the one before."""
    steps = [5 + 4 * number - chance.randrange(2) for number in range(len(sizes) - 1)]
    kills = tuple(
        Kill(
            number,
            chance.choice(["begin", "backward", "end"]),
            rank=chance.randrange(size),
            step=step,
        )
        for number, (size, step) in enumerate(zip(sizes, steps, strict=False), start=1)
    )
    plan = Plan(
        "", accumulates=chance.random() < 0.5, num_workers=chance.choice([0, 0, 2]), is_elastic=True
    )
    return KillPoint(
        f"sizes-{'-'.join(map(str, sizes))}-{backend}", backend, kills, sizes=sizes, plan=plan
    )


def _to_the_last_bit(point: KillPoint) -> KillPoint:
    plan = replace(point.plan, accumulates=False, virtual_ranks=4)
    return replace(point, name=f"elastic-{point.name}", plan=plan)


def _on_the_wire(chance: random.Random) -> Iterator[KillPoint]:
    """Requests to S3 that are broken off, or done without the client ever hearing of it;
    uploads in parts."""
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
    first = Kill(
        1, "end", rank=chance.randrange(2), step=chance.randrange(RESUMABLE_FROM, NUM_STEPS)
    )
    read = WireKill(2, "GET", r"model\.pt", "after")
    yield KillPoint("wire-restart-reads", "s3", (first,), (read,), sizes=(2, 2, 2))


def ids(points: Sequence[KillPoint]) -> list[str]:
    """Return the names, by which pytest's -k finds a point again."""
    return [point.name for point in points]


def sample(points: Sequence[KillPoint], kinds: Sequence[str]) -> list[KillPoint]:
    """Choose the first point of each kind."""
    return [next(point for point in points if f"-{kind}" in point.name) for kind in kinds]
