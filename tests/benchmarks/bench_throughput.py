"""How fast steps are once a training runs, compared with torchrun and the same code; and how
much processor time Dask and the agents use meanwhile. The trainings take turns of about a
second; the others are stopped with all their processes, by SIGSTOP. A turn's ratio
compares blocks that are seconds apart, and the median of many is reported."""

import statistics
import sys
from contextlib import ExitStack
from operator import truediv
from pathlib import Path

import pytest
import torch

from tests.benchmarks import steady, steady_gang
from tests.benchmarks.beside import command_of_torchrun, median_and_half, rounds, show
from tests.benchmarks.taking_turns import trainer

pytestmark = pytest.mark.timeout(900)
NUM_TURNS = rounds(31)
WORKS = {
    "cpu": (256, ((128, 90), (256, 60), (768, 30))),
    "cuda": (2048, ((256, 600), (1024, 300), (4096, 100))),
}
"""By device the features of a row; the rows per rank and step, and the steps in a turn, of about
6, 9 and 18 ms on two cores of 2026."""
REFERENCE = "torchrun"


@pytest.mark.parametrize("device", list(WORKS))
def test_steady_training(tmp_path: Path, device: str) -> None:
    """Print the table of docs/performance.md: medians over the turns, and the median of the
    turns' ratios; on a rank for each GPU."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    num_ranks = 2 if device == "cpu" else torch.cuda.device_count()
    gang = (sys.executable, str(Path(steady_gang.__file__)))
    commands = {
        REFERENCE: command_of_torchrun(Path(steady.__file__), num_ranks=num_ranks),
        "run_gang": (*gang, "plain"),
        "run_gang with RankContext": (*gang, "context"),
    }
    width, works = WORKS[device]
    rows = []
    with ExitStack() as stack:
        trainers = {
            name: stack.enter_context(
                trainer(
                    command,
                    steady.Turns(str(tmp_path / str(number)), NUM_TURNS, works, width, device),
                )
            )
            for number, (name, command) in enumerate(commands.items())
        }
        for num_rows, _ in works:
            for each in trainers.values():
                each.make_ready()
            seen: dict[str, list[float]] = {name: [] for name in trainers}
            for number in range(NUM_TURNS):
                names = list(trainers)
                for name in names[number % 3 :] + names[: number % 3]:
                    seen[name].append(trainers[name].turn() * 1000)
            for name, paces in seen.items():
                ratios = list(map(truediv, seen[REFERENCE], paces))
                times = f"{statistics.median(paces):.2f}", f"{max(paces):.2f}"
                rows.append((f"{num_rows} rows: {name}", *times, *median_and_half(ratios)))
        for each in trainers.values():
            each.finish()
    what = "throughput, times torchrun's | middle half of the turns"
    show(f"steps of | median ms | worst ms | {what}", rows)
    cores = statistics.median(trainers["run_gang"].cores_of_dask)
    print(f"\nDask's processes and the caller take {cores:.3f} cores while a gang trains.")
