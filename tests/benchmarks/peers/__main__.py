"""`make bench-peers`: run all scripts, undisturbed and with kills, and print the table.

PTD_BENCH_ROUNDS is how many jobs each does, and PTD_BENCH_SECONDS how long the runs with kills
last; those without, whose steps are all alike, last less than half of it. Names as arguments choose
peers; `--table` only shows what the last runs have left.
"""

import argparse
import os
import platform
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.benchmarks.peers import environments, figures
from tests.benchmarks.peers.runs import Peer, Plan, run
from tests.benchmarks.peers.training import SAVE_EVERY, STEPS_PER_EPOCH

OURS = "prefect-torch-ddp"
RESULTS = environments.HOME / "results"
ROUNDS = int(os.environ.get("PTD_BENCH_ROUNDS", "3"))
LASTS_S = float(os.environ.get("PTD_BENCH_SECONDS", "300"))
KILL_EVERY_S, JOB_EPOCHS, JOB_LIMIT_S = 30.0, 4, 300.0
FOR_EVER = 1_000_000
JOB = Plan(JOB_EPOCHS, JOB_LIMIT_S)
LONG = {
    "undisturbed": Plan(FOR_EVER, 0.4 * LASTS_S),
    "killed": Plan(FOR_EVER, LASTS_S, KILL_EVERY_S),
}
PEERS = {
    "torchrun": Peer("torchrun", "with_torchrun.py", "torch", is_under_torchrun=True),
    "ray": Peer("Ray Train", "with_ray.py", "ray", "ray"),
    "lightning": Peer(
        "Lightning", "with_lightning.py", "lightning", "lightning", is_under_torchrun=True
    ),
    "accelerate": Peer(
        "Accelerate", "with_accelerate.py", "accelerate", "accelerate", is_under_torchrun=True
    ),
    "dask_pytorch_ddp": Peer(
        "dask-pytorch-ddp", "with_dask_pytorch_ddp.py", "dask-pytorch-ddp", "dask_pytorch_ddp"
    ),
    "ours": Peer("prefect_torch_ddp", "with_ours.py", OURS),
    "ours_same": Peer(
        f"the same, a save every {SAVE_EVERY} steps",
        *("with_ours.py", OURS),
        arguments=(str(SAVE_EVERY),),
    ),
}


def measure(names: Sequence[str]) -> None:
    """Run everything, one after the other: jobs in rounds, then the long runs."""
    environments.HOME.mkdir(exist_ok=True)
    for environment in {PEERS[name].environment for name in names} - {None}:
        environments.make(str(environment))
    for name in names:
        shutil.rmtree(RESULTS / name, ignore_errors=True)
    for number in range(ROUNDS):
        for name in [*names[number % len(names) :], *names[: number % len(names)]]:
            _run(name, JOB, f"job-{number}")
    for name in names:
        for kind, plan in LONG.items():
            _run(name, plan, kind)


def show(names: Sequence[str]) -> None:
    """Print the tables from what was left."""
    columns = {}
    for name in names:
        peer, folder = PEERS[name], RESULTS / name
        runs = figures.Runs(
            [figures.read(job) for job in sorted(folder.glob("job-*"))],
            figures.read(folder / "undisturbed"),
            figures.read(folder / "killed"),
        )
        source = Path(__file__).with_name(peer.script).read_text("utf-8")
        version = environments.version_of(peer.environment, peer.package)
        head = {"version": version, "lines of code": str(figures.code_lines(source))}
        is_known = name != "ours"  # where the default decides, saves aren't at known steps
        columns[peer.title] = head | figures.column(runs, SAVE_EVERY if is_known else None)
        for line in figures.said(runs.killed):
            print(f"{peer.title}: {line[:200]}")
    steps = JOB_EPOCHS * STEPS_PER_EPOCH
    print(f"\nJobs of {steps} steps; runs of {columns and runs.killed.limit_s:g} s with a kill")
    print(f"every {KILL_EVERY_S:g} s; Python {platform.python_version()}, {os.cpu_count()} cores.")
    print(f"\n{figures.table(columns)}")


def _run(name: str, plan: Plan, kind: str) -> None:
    load = f"load {os.getloadavg()[0]:.1f}"
    print(f"{time.strftime('%H:%M:%S')} {name}, {kind}, {load}", file=sys.stderr, flush=True)
    run(PEERS[name], plan, RESULTS / name / kind)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*PEERS, []], default=[])
    parser.add_argument("--table", action="store_true")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a run ends what it started
    chosen = given.names or list(PEERS)
    if not given.table:
        measure(chosen)
    show(chosen)
