"""The drawing of seeded kill points: where a training is killed, and what that training is
like."""

import itertools
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from tests.support.killing_storage import Kill, WireKill
from tests.workloads.killed import NUM_STEPS, SAVE_EVERY, Plan

Backend = Literal["directory", "s3"]
BACKENDS: tuple[Backend, ...] = ("directory", "s3")
RESUMABLE_FROM = 6
"""A rank in this step knows that a checkpoint is on record: rank 0 has begun the second one."""
NUM_OBJECTS = 6
"""Of a checkpoint of two ranks: model, optimizer, scheduler, ballast, and two of random
generators."""
LAST = rf"step-{NUM_STEPS:08d}/"
MANIFEST = r"manifest\.json$"


SEED = int(os.environ.get("PTD_SEED", "20261121"))
"""Of this run: `make chaos SEED=` gives it, else it is always the same."""


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
        return len(self.sizes) - 1


class Chance(random.Random):
    """What is drawn."""

    def rank(self) -> int:
        return self.randrange(2)

    def resumable_step(self) -> int:
        """A step from which a next attempt resumes."""
        return self.randrange(RESUMABLE_FROM, NUM_STEPS)

    def around(self) -> Any:
        return self.choice(["before", "after"])

    def plan(self) -> dict[str, Any]:
        return {"accumulates": self.random() < 0.4, "num_workers": self.choice([0, 0, 0, 2])}


def every_kill_point(seed: int) -> list[KillPoint]:
    """Draw the kill points: each kind on a directory and on S3, and those of file systems
    and wires on the storage that has them."""
    chance = Chance(seed)
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
        sizes = ((4, 2, 1, 4), (1, 2), (2, 4, 1), (4, 2, 1, 4))
        *others, elastic = [_with_other_sizes(chance, backend, each) for each in sizes]
        plan = replace(elastic.plan, accumulates=False, virtual_ranks=4)
        points += [*others, replace(elastic, name=f"elastic-{elastic.name}", plan=plan)]
    points += [*_on_the_wire(chance), *_in_an_own_loop()]
    return [
        replace(point, name=f"{seed}-{number:03d}-{point.name}")
        for number, point in enumerate(points)
    ]


def _fits(point: KillPoint, backend: Backend) -> bool:
    return backend == "directory" or all(kill.moment in ("before", "after") for kill in point.kills)


def _point(name: str, *kills: Kill, size: int = 2, **plan: Any) -> KillPoint:
    sizes = (size,) * (len(kills) + 1)
    return KillPoint(name, "directory", kills, sizes=sizes, plan=Plan("", **plan))


def _in_training(chance: Chance) -> Iterator[KillPoint]:
    """In the loop's body, in the middle of an accumulation, at any moment, in a DataLoader's
    worker."""
    for place in ("begin", "backward", "end"):
        size = chance.choice([1, 2, 4])
        kill = Kill(1, place, rank=chance.randrange(size), step=chance.randrange(1, NUM_STEPS + 1))
        yield _point(f"mid-epoch-{place}", kill, size=size, **chance.plan())
    steps = [step for step in range(2, NUM_STEPS) if step % 5]
    kill = Kill(1, "micro_batch", rank=chance.rank(), step=chance.choice(steps))
    yield _point("mid-accumulation", kill, accumulates=True)
    for _ in range(2):
        rank, step = chance.rank(), chance.randrange(1, 13)
        kill = Kill(1, "timer", rank=rank, step=step, delay_s=chance.uniform(0, 0.03))
        yield _point("any-moment", kill, **chance.plan())
    kill = Kill(1, "data_worker", rank=chance.rank(), nth=chance.randrange(1, 7))
    yield _point("data-worker", kill, num_workers=2)


def _while_saving(chance: Chance) -> Iterator[KillPoint]:
    """While the state is copied, around the objects' and the records' writes, around the
    commit."""
    yield _point("mid-copy", Kill(1, "staging", nth=chance.randrange(1, 6)), **chance.plan())
    key = r"(model|optimizer|rank-\d+)\.pt$"
    for rank, moment in itertools.product(range(2), ("before", "torn", "within", "after")):
        kill = Kill(1, "write", rank, key=key, moment=moment, nth=chance.randrange(1, 9))
        yield _point(f"mid-save-{moment}-on-{rank}", kill, **chance.plan())
    for moment in ("before", "within", "after"):
        nth = chance.randrange(1, 5)
        kill = Kill(1, "write_if_absent", 1, key="/metrics/", moment=moment, nth=nth)
        yield _point(f"mid-flush-{moment}", kill)
    for moment in ("before", "torn", "within", "after"):
        nth = chance.randrange(1, 6)
        kill = Kill(1, "write_if_absent", key=MANIFEST, moment=moment, nth=nth)
        yield _point(f"mid-commit-{moment}", kill, **chance.plan())


def _while_cleaning(chance: Chance) -> Iterator[KillPoint]:
    """Between a commit and the deletes that follow it, and between these."""
    for nth in (1, 2, chance.randrange(3, NUM_OBJECTS + 1), NUM_OBJECTS + 1):
        moment = chance.around()
        kill = Kill(1, "delete", moment=moment, nth=nth + chance.choice([0, NUM_OBJECTS + 1]))
        yield _point(f"retention-{nth}-{moment}", kill)
    kill = Kill(1, "delete", moment="within", nth=chance.randrange(1, NUM_OBJECTS + 2))
    yield _point("retention-within", kill)


def _after_a_restart(chance: Chance) -> Iterator[KillPoint]:
    """The second attempt is killed as well: while it looks, reads, restores, in its first step,
    while it sweeps."""

    def first() -> Kill:
        return Kill(1, "backward", rank=chance.rank(), step=chance.resumable_step())

    def second(place: Any, rank: int | None = None, **where: Any) -> Kill:
        return Kill(2, place, rank, **where)

    for rank in range(2):
        where = {"moment": chance.around(), "nth": chance.randrange(1, 5)}
        yield _point(
            f"restart-reads-on-{rank}", first(), second("read", rank, key=r"\.pt$", **where)
        )
    yield _point("restart-looks", first(), second("read", key=MANIFEST, moment=chance.around()))
    yield _point("restart-restores", first(), second("restoring", chance.rank()))
    yield _point("restart-tracked", first(), second("tracked", chance.rank()), **chance.plan())
    for place in ("begin", "end"):
        kills = first(), second(place, chance.rank())
        yield _point(f"restart-first-step-{place}", *kills, **chance.plan())
    rank, nth = chance.rank(), chance.randrange(4, 10)
    left = Kill(1, "write", rank, key=r"\.pt$", moment="after", nth=nth)
    for moment in ("before", "after"):
        kill = second("delete", key="/000001/", moment=moment)
        yield _point(f"restart-sweeps-{moment}", left, kill)
    third = Kill(3, "write_if_absent", key=MANIFEST, moment="after")
    kill = second("write", key=r"\.pt$", moment="after", nth=2)
    yield _point("three-restarts", first(), kill, third)


def _at_the_end(chance: Chance) -> Iterator[KillPoint]:
    """After the loop, and while the last checkpoint is written."""
    yield _point("loop-left", Kill(1, "left", rank=chance.rank()))
    for rank in range(2):
        # Rank 1 writes the optimizer and its generators.
        where = {"moment": chance.around(), "nth": chance.randrange(1, 4 if rank == 0 else 3)}
        kill = Kill(1, "write", rank, key=LAST, **where)
        yield _point(f"last-save-on-{rank}", kill, **chance.plan())
    for moment in ("before", "after"):
        kill = Kill(1, "write_if_absent", key=rf"{LAST}\d+/manifest", moment=moment)
        yield _point(f"last-commit-{moment}", kill, **chance.plan())
    gone = rf"step-{(NUM_STEPS - 3) // SAVE_EVERY * SAVE_EVERY:08d}/"
    nth = chance.randrange(1, NUM_OBJECTS + 1)
    yield _point("last-retention", Kill(1, "delete", key=gone, moment="after", nth=nth))


def _within_calls_of_a_file_system(chance: Chance) -> Iterator[KillPoint]:
    """Within a call of the second attempt, too."""
    first = Kill(1, "end", rank=chance.rank(), step=chance.resumable_step())
    places = (("write", r"\.pt$"), ("write_if_absent", MANIFEST), ("delete", ""))
    for place, key in places:
        yield _point(f"restart-within-{place}", first, Kill(2, place, key=key, moment="within"))


def _with_other_sizes(chance: Chance, backend: Backend, sizes: tuple[int, ...]) -> KillPoint:
    """Each attempt has another number of ranks, and gets further than the one before."""
    steps = [5 + 4 * number - chance.randrange(2) for number in range(len(sizes) - 1)]
    kills = []
    for number, (size, step) in enumerate(zip(sizes, steps, strict=False), start=1):
        place = chance.choice(["begin", "backward", "end"])
        kills.append(Kill(number, place, rank=chance.randrange(size), step=step))
    like = {"accumulates": chance.random() < 0.5, "num_workers": chance.choice([0, 0, 2])}
    name = f"sizes-{'-'.join(map(str, sizes))}-{backend}"
    plan = Plan("", is_elastic=True, **like)
    return KillPoint(name, backend, tuple(kills), sizes=sizes, plan=plan)


REQUESTS = (
    ("object-on-0", "PUT", r"model\.pt", 5),
    ("object-on-1", "PUT", r"rank-00001\.pt", 5),
    ("metrics", "PUT", "/metrics/", 4),
    ("manifest", "PUT", r"manifest\.json", 5),
    ("delete-manifest", "DELETE", r"manifest\.json", 4),
    ("delete-object", "DELETE", r"\.pt", NUM_OBJECTS),
    ("upload-begins", "POST", "uploads", 3),
    ("upload-part", "PUT", "partNumber=", 6),
    ("upload-ends", "POST", "uploadId=", 3),
)


def _on_the_wire(chance: Chance) -> Iterator[KillPoint]:
    """Requests to S3 that are broken off, or done without the client ever hearing of it;
    uploads in parts."""
    for (name, method, path, num), moment in itertools.product(REQUESTS, ("within", "after")):
        if moment == "within" and (method == "DELETE" or name == "upload-begins"):
            continue  # no body to break off
        kill = WireKill(1, method, path, moment, nth=chance.randrange(1, num + 1))
        is_big = name.startswith("upload")
        plan = Plan("", is_big=is_big, accumulates=chance.random() < 0.3)
        yield KillPoint(f"wire-{name}-{moment}", "s3", wire_kills=(kill,), plan=plan)
    first = Kill(1, "end", rank=chance.rank(), step=chance.resumable_step())
    read = WireKill(2, "GET", r"model\.pt", "after")
    yield KillPoint("wire-restart-reads", "s3", (first,), (read,), sizes=(2, 2, 2))


MODEL = r"model\.pt$"
IN_AN_OWN_LOOP = {
    "in-a-round": (Kill(1, "backward", rank=1, step=6),),
    "behind-a-round": (Kill(1, "end", rank=0, step=7),),
    "mid-save": (Kill(1, "write", key=MODEL, moment="torn", nth=3),),
    "mid-save-on-1": (Kill(1, "write", rank=1, key=r"\.pt$", moment="after", nth=4),),
    "before-the-commit": (Kill(1, "write_if_absent", key=MANIFEST, nth=3),),
    "within-the-commit": (Kill(1, "write_if_absent", key=MANIFEST, moment="within", nth=2),),
    "behind-the-commit": (Kill(1, "write_if_absent", key=MANIFEST, moment="after", nth=2),),
    "at-the-last-commit": (Kill(1, "write_if_absent", key=MANIFEST, moment="after", nth=5),),
    "in-the-clean-up": (Kill(1, "delete", moment="after", nth=2),),
    "twice": (
        Kill(1, "begin", rank=0, step=6),
        Kill(2, "write_if_absent", key=MANIFEST, moment="after"),
    ),
}


def _in_an_own_loop() -> Iterator[KillPoint]:
    """A training without ctx.steps: what it resumes from is the newest checkpoint that it asked
    for; its data and its dropout are drawn by the global generators."""
    for name, kills in IN_AN_OWN_LOOP.items():
        point = _point(f"own-loop-{name}", *kills, in_own_loop=True)
        yield point
        if name in {"behind-a-round", "before-the-commit", "behind-the-commit"}:
            yield replace(point, name=f"{point.name}-s3", backend="s3")
    unheard = (WireKill(1, "PUT", r"manifest\.json", "after", nth=2),)
    plan = Plan("", in_own_loop=True)
    yield KillPoint("own-loop-unheard-commit", "s3", wire_kills=unheard, plan=plan)


POINTS = every_kill_point(SEED)


def sample(kinds: str, points: Sequence[KillPoint] = POINTS) -> list[KillPoint]:
    """Choose the first point of each kind."""
    return [next(point for point in points if f"-{kind}" in point.name) for kind in kinds.split()]
