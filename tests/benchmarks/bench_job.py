"""What people run: the whole of train_flow, compared with the same training under torchrun."""

import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import TaskRun
from prefect.client.schemas.sorting import TaskRunSort

from tests.benchmarks import job_flow, job_plain
from tests.benchmarks.beside import command_of_torchrun, rounds, show

pytestmark = [pytest.mark.timeout(1800), pytest.mark.usefixtures("on_cpus")]
ROUNDS = rounds(5)
TORCHRUN, FRESH, WARM = "torchrun", "train_flow, fresh process", "train_flow, warm cluster"
FRESH_ALONE, WARM_ALONE = (f"{each}, no heartbeats" for each in (FRESH, WARM))
"""Without the up to one second that Prefect's flow waits for the thread of its heartbeats."""
PARTS = (
    *("import", "flow begins", "cluster", "prepare, train submitted", "train to its first step"),
    *("loop", "after the last step", "evaluate", "publish", "flow ends", "close"),
)
FIRST_EPOCHS = 3


class Job:
    """One measured job."""

    def __init__(self, marks: Sequence[float], steps: Sequence[float]) -> None:
        """Take the times at which the parts began and the last one ended, and those of steps."""
        self.whole_s = marks[-1] - marks[0]
        self.parts_s = [after - before for before, after in itertools.pairwise(marks)]
        self.step_ms = 1000 * (steps[-1] - steps[0]) / (len(steps) - 1)
        early = steps[: 1 + (len(steps) - 1) * FIRST_EPOCHS // 20]
        self.early_step_ms = 1000 * (early[-1] - early[0]) / (len(early) - 1)


def run_torchrun(data: Path, times: Path) -> Job:
    """Train by torchrun; nothing else is in it."""
    began = time.time()
    command = command_of_torchrun(Path(job_plain.__file__))
    subprocess.run([*command, str(data), str(times)], check=True, capture_output=True)
    return Job((began, time.time()), json.loads(times.read_text()))


def run_fresh(storage: Path, times: Path, heartbeats: str = "none") -> Job:
    """Run the flow in a new process, which starts its cluster."""
    began = time.time()
    command = [sys.executable, "-m", job_flow.__name__, str(storage), str(times), heartbeats]
    called, _ = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    return _job(began, called, time.time(), times)


class WarmFlows:
    """A process that runs flows, one after the other, on a cluster that it keeps."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        """Take the process, which waits for lines."""
        self._process = process

    def run(self, storage: Path, times: Path, heartbeats: str = "none") -> Job:
        """Run one."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([str(storage), str(times), heartbeats]) + "\n")
        self._process.stdin.flush()
        called, returned = json.loads(self._process.stdout.readline())
        return _job(called, called, returned, times)


@contextmanager
def warm_flows() -> Iterator[WarmFlows]:
    """Start the process."""
    command = [sys.executable, "-m", job_flow.__name__]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True
    ) as process:
        yield WarmFlows(process)


def _job(began: float, called: float, ended: float, times: Path) -> Job:
    steps = json.loads(times.read_text())
    tasks = _newest_tasks()
    starts = {name: _seconds(run.start_time) for name, run in tasks.items()}
    ends = {name: _seconds(run.end_time) for name, run in tasks.items()}
    flow_began, flow_ended = _times_of_flow(tasks["prepare"])
    to_loop = began, called, flow_began, starts["prepare"], starts["train"]
    loop, after = (steps[1], steps[-1]), (ends[name] for name in ("train", "evaluate", "publish"))
    return Job((*to_loop, *loop, *after, flow_ended, ended), steps)


def _newest_tasks() -> dict[str, TaskRun]:
    with get_client(sync_client=True) as client:
        runs = client.read_task_runs(sort=TaskRunSort.END_TIME_DESC, limit=4)
    return {run.name.rsplit("-", 1)[0]: run for run in runs}


def _times_of_flow(task_run: TaskRun) -> tuple[float, float]:
    """Return when Prefect's engine told the server that the flow began, and that it ended."""
    with get_client(sync_client=True) as client:
        assert task_run.flow_run_id is not None
        run = client.read_flow_run(task_run.flow_run_id)
        return _seconds(run.start_time), _seconds(run.end_time)


def _seconds(moment: object) -> float:
    return moment.timestamp()  # type: ignore[attr-defined,no-any-return]


@pytest.mark.usefixtures("prefect_api")
def test_whole_job(tmp_path: Path) -> None:
    """Print the tables of docs/performance.md: medians of the rounds, and of their ratios."""
    storage, times = tmp_path / "runs", tmp_path / "times.json"
    names = TORCHRUN, FRESH, FRESH_ALONE, WARM, WARM_ALONE
    jobs: dict[str, list[Job]] = {name: [] for name in names}
    with warm_flows() as warm:
        warm.run(storage, times)  # prepares the dataset
        (data,) = {found.parent for found in storage.rglob("train") if found.is_dir()}
        for number in range(ROUNDS):
            runs = {
                TORCHRUN: lambda: run_torchrun(data, times),
                FRESH: lambda: run_fresh(storage, times, "beats"),
                FRESH_ALONE: lambda: run_fresh(storage, times),
                WARM: lambda: warm.run(storage, times, "beats"),
                WARM_ALONE: lambda: warm.run(storage, times),
            }
            turn = number % len(names)
            for name in names[turn:] + names[:turn]:
                jobs[name].append(runs[name]())
    steps = f"mean step ms | times torchrun | of the first {FIRST_EPOCHS} epochs"
    head = f"job | median s | worst s | times torchrun | all rounds | {steps}"
    show(head, [_summary(name, jobs) for name in jobs])
    medians = [
        [statistics.median(found) for found in zip(*(job.parts_s for job in jobs[n]), strict=True)]
        for n in (FRESH_ALONE, WARM_ALONE)
    ]
    rows = zip(PARTS, *([f"{found:.2f}" for found in each] for each in medians), strict=True)
    show(f"where the seconds go | {FRESH_ALONE} | {WARM_ALONE}", rows)


def _summary(name: str, jobs: dict[str, list[Job]]) -> tuple[str, ...]:
    def ratio(of: str) -> float:
        pairs = zip(jobs[name], jobs[TORCHRUN], strict=True)
        ratios: list[float] = [getattr(j, of) / getattr(ref, of) for j, ref in pairs]
        return statistics.median(ratios)

    whole = [job.whole_s for job in jobs[name]]
    return (
        name,
        f"{statistics.median(whole):.1f}",
        f"{max(whole):.1f}",
        f"{ratio('whole_s'):.2f}",
        " ".join(f"{seconds:.1f}" for seconds in whole),
        f"{statistics.median(job.step_ms for job in jobs[name]):.2f}",
        f"{ratio('step_ms'):.3f}",
        f"{ratio('early_step_ms'):.3f}",
    )
