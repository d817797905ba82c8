"""What a step and a save of other libraries' Trainers take in a `ddp_task`, with `attach`, compared
with the same training under torchrun with the Trainer's own saves."""

import json
import statistics
import sys
from contextlib import ExitStack
from operator import truediv
from pathlib import Path

import pytest

from tests.benchmarks import steady, trainer_flow, trainer_steps
from tests.benchmarks.beside import command_of_torchrun, median_and_half, rounds, show
from tests.benchmarks.taking_turns import trainer

pytestmark = [pytest.mark.timeout(1800), pytest.mark.usefixtures("prefect_api")]
NUM_TURNS = rounds(31)
WIDTH = 128
LOCAL_BATCH, NUM_STEPS = 8, 20
TORCHRUN, OURS = "torchrun", "ddp_task"


@pytest.mark.parametrize("program", list(trainer_steps.PROGRAMS))
def test_steps_and_saves_of_a_trainer(tmp_path: Path, program: str) -> None:
    """Print the median of the turns' ratios of seconds per step, and of the stalls of rank 0 from
    the end of a step to the begin of the next one, with a save between them."""
    commands = {
        TORCHRUN: (*command_of_torchrun(Path(trainer_steps.__file__)), program),
        OURS: (sys.executable, str(Path(trainer_flow.__file__)), program),
    }
    seen: dict[str, list[float]] = {name: [] for name in commands}
    with ExitStack() as stack:
        trainers = {}
        for name, command in commands.items():
            works = ((LOCAL_BATCH, NUM_STEPS),)
            turns = steady.Turns(str(tmp_path / name), NUM_TURNS, works, WIDTH)
            trainers[name] = stack.enter_context(trainer(command, turns))
        for each in trainers.values():
            each.make_ready()
        for number in range(NUM_TURNS):
            names = list(trainers)
            for name in names if number % 2 else reversed(names):
                seen[name].append(trainers[name].turn() * 1000)
        for each in trainers.values():
            each.finish()
    stalls = {
        name: [
            1000 * each for each in json.loads((tmp_path / name / trainer_steps.STALLS).read_text())
        ]
        for name in commands
    }
    rows = []
    for name, paces in seen.items():
        ratios = list(map(truediv, paces, seen[TORCHRUN]))
        times = statistics.median(paces), statistics.median(stalls[name]), max(stalls[name])
        of_stalls = list(map(truediv, stalls[name], stalls[TORCHRUN]))
        shown = (f"{each:.1f}" for each in times)
        rows.append((name, *shown, *median_and_half(ratios), *median_and_half(of_stalls)))
    what = "step, times torchrun's | middle half | stall, times torchrun's | middle half"
    show(f"{program} | step ms | stall ms | worst ms | {what}", rows)
