"""Programs of others in a flow, and where they are struck; drawn from a seed."""

import contextlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import get_args

import psutil
from prefect import flow
from prefect_dask import DaskTaskRunner

from prefect_torch_ddp import CheckpointParams, ddp_task
from tests.support.flow_watches import watch_of
from tests.support.kill_points import SEED
from tests.workloads import struck_programs
from tests.workloads.struck_programs import FLOW_PID, Strike, Victim

PROGRAMS = ("transformers", "lightning", "accelerate", "committed")
NUM_STEPS, SAVE_EVERY = 15, 3
NUM_EACH = 20
COMMAND_S = 300
CALL = "import sys; from tests.support import program_strikes as s; s.call(*sys.argv[1:])"


@dataclass(frozen=True)
class Point:
    """A program and its strike."""

    program: str
    victim: Victim
    step: int
    rank: int
    delay_s: float
    name: str


def every_point(seed: int) -> Iterator[Point]:
    """Draw twenty points for each program, five for each victim."""
    chance = random.Random(seed)
    for program in PROGRAMS:
        for number in range(NUM_EACH):
            victim = get_args(Victim)[number % len(get_args(Victim))]
            step, rank = chance.randint(1, NUM_STEPS), chance.randrange(2)
            name = f"{seed}-{program}-{number:02}-{victim}-at-{step}"
            yield Point(program, victim, step, rank, chance.uniform(0, 0.1), name)


POINTS = list(every_point(SEED))


def nightly(address: str, program: str, folder: Path, strike: Strike | None) -> str:
    """Run a program in a flow, from the newest checkpoint of a run that didn't end."""
    train = ddp_task(
        world_size=2,
        max_restarts=1,
        retries=2,
        storage=str(folder / "storage"),
        checkpoint=CheckpointParams(every_s=None, every_steps=SAVE_EVERY),
        resume_from="latest",
    )(struck_programs.train)

    @flow(name="programs", task_runner=DaskTaskRunner(address=address))
    def programs() -> str:
        value: str = train.submit(program, str(folder), strike).result()
        return value

    (folder / FLOW_PID).write_text(str(os.getpid()), encoding="utf-8")
    return programs()


def call(address: str, program: str, folder: str, strike: str) -> None:
    """Run it so, in a process that may be killed; leave its value in a file."""
    value = nightly(address, program, Path(folder), Strike(**json.loads(strike)))
    (Path(folder) / "value").write_text(value, encoding="utf-8")


def run(address: str, point: Point, folder: Path) -> str:
    """Run a program through its strike; a killed flow is started again. Return its value."""
    strike = Strike(point.victim, point.step, point.rank, point.delay_s, str(folder))
    if point.victim != "flow":
        return nightly(address, point.program, folder, strike)
    arguments = [address, point.program, str(folder), json.dumps(asdict(strike))]
    command = [sys.executable, "-c", CALL, *arguments]
    killed = subprocess.Popen(command)
    assert killed.wait(COMMAND_S) == -9, "the flow wasn't killed"
    watch = watch_of(killed.pid)
    subprocess.run(command, check=True, timeout=COMMAND_S)
    with contextlib.suppress(psutil.NoSuchProcess):
        watch.kill()  # it waits for 45 s whether others close the run, which is no matter here
        watch.wait()
    return (folder / "value").read_text(encoding="utf-8")
