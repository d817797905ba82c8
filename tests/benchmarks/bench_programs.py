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

pytestmark = [pytest.mark.timeout(1800), pytest.mark.usefixtures("on_cpus", "prefect_api")]
NUM_TURNS = rounds(31)
WIDTH = 128
LOCAL_BATCH, NUM_STEPS = 8, 20
WHATS = "a step, ms", "a save's stall, ms", "processor time of rank 0 a step, ms"
TORCHRUN, OURS = "torchrun", "ddp_task"


@pytest.mark.parametrize("program", list(trainer_steps.PROGRAMS))
def test_steps_and_saves_of_a_trainer(tmp_path: Path, program: str) -> None:
    """Print the medians of the turns' ratios: of the time of a step, of rank 0's stall from the end
    of a step to the begin of the next one with a save between them, and of its processor time,
    which another program on the machine changes less."""
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
    own = {
        name: json.loads((tmp_path / name / trainer_steps.MEASURED).read_text())
        for name in commands
    }
    rows = []
    for name, paces in seen.items():
        values = {"step": paces, "stall": own[name]["stalls_s"], "cpu": own[name]["cpu_s"]}
        base = {"step": seen[TORCHRUN], "stall": own[TORCHRUN]["stalls_s"]}
        base["cpu"] = own[TORCHRUN]["cpu_s"]
        cells = [name]
        for what, of_turns in values.items():
            median_ms = statistics.median(of_turns) * (1 if what == "step" else 1000)
            ratios = list(map(truediv, of_turns, base[what]))
            cells += [f"{median_ms:.1f}", *median_and_half(ratios)]
        rows.append(cells)
    head = (f"{what} | times torchrun's | middle half" for what in WHATS)
    show(f"{program} | {' | '.join(head)}", rows)
