"""One run of a peer's script: started, observed, killed at times, and ended with all it started."""

import contextlib
import ctypes
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.benchmarks.peers.environments import HOME, python_of
from tests.support.waiting import HANG_S
from tests.yardsticks import ROOT

PR_SET_CHILD_SUBREAPER = 36
LOOK_EVERY_S, WEIGH_EVERY_S = 0.05, 5.0
AS_A_USER = {
    "PYTHONPATH": str(ROOT),
    "OMP_NUM_THREADS": "1",  # as torchrun, Ray and Dask have it too
    # Else ranks that torchrun has started again may take the addresses of those before from its
    # store, and never connect: with torch 2.15 and gloo, if one reaches the store seconds later.
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "1",
}


@dataclass(frozen=True)
class Peer:
    """What somebody picks, and how its script is run."""

    title: str
    script: str
    package: str
    """Whose version is shown."""
    environment: str | None = None
    arguments: tuple[str, ...] = ()
    is_under_torchrun: bool = False

    def command(self) -> list[str]:
        """Return what starts a training."""
        run = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        launcher = [*run, "--max-restarts=1000"] if self.is_under_torchrun else []
        script = str(Path(__file__).with_name(self.script))
        return [str(python_of(self.environment)), *launcher, script, *self.arguments]


@dataclass(frozen=True)
class Plan:
    """What is done with a run: a whole training, or one that lasts for ever and is stopped."""

    epochs: int
    limit_s: float
    kill_every_s: float | None = None


class Run:
    """A training with everything that it has started, which are descendants of this process."""

    def __init__(self, peer: Peer, plan: Plan, folder: Path) -> None:
        """Start it; it writes below the folder, which has a short path, as sockets need it."""
        self._plan, self._folder = plan, folder
        self._memory = {"ranks": 0.0, "others": 0.0}
        self._kills: list[float] = []
        self._num_due = 0
        (folder / "tmp").mkdir()
        removed = ("MALLOC_TRIM_THRESHOLD_", "PREFECT_API_URL", "RAY_ADDRESS")
        inherited = {name: value for name, value in os.environ.items() if name not in removed}
        own = {
            "PTD_PEER_FOLDER": str(folder),
            "PTD_PEER_EPOCHS": str(plan.epochs),
            "TMPDIR": str(folder / "tmp"),
            # As a user's second run has it: the first one makes the database of Prefect's server.
            "PREFECT_HOME": str(HOME / "prefect"),
        }
        _adopt_orphans()
        self._began = self._ended = time.time()
        with (folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                peer.command(),
                cwd=folder,
                env={**inherited, **AS_A_USER, **own},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def observe(self) -> None:
        """Wait until it ends or its time is over; kill its rank 1 when that is due."""
        weighed = time.time()
        while not self._has_ended() and time.time() < self._began + self._plan.limit_s:
            every_s = self._plan.kill_every_s
            if every_s and time.time() >= self._began + every_s * (self._num_due + 1):
                self._kill()
            if not every_s and time.time() >= weighed + WEIGH_EVERY_S:
                weighed = time.time()
                self._weigh()
        self._ended = time.time()

    def close(self) -> None:
        """End everything, and write what was observed next to the marks."""
        while everyone := psutil.Process().children(recursive=True):
            for process in everyone:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(everyone, timeout=HANG_S)
        observed = {
            "began": self._began,
            "ended": self._ended,
            "exit_code": self._process.returncode,  # None: it was stopped
            "limit_s": self._plan.limit_s,
            "kills": self._kills,
            "memory_mb": self._memory,
        }
        (self._folder / "run.json").write_text(json.dumps(observed))

    def _has_ended(self) -> bool:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(LOOK_EVERY_S)
        return self._process.returncode is not None

    def _rank(self, rank: int) -> int | None:
        with contextlib.suppress(FileNotFoundError, ValueError):
            return int((self._folder / f"rank-{rank}").read_text())
        return None

    def _kill(self) -> None:
        """Kill rank 1, unless there is none at that moment."""
        self._num_due += 1
        everyone = {each.pid for each in psutil.Process().children(recursive=True)}
        pid = self._rank(1)
        with contextlib.suppress(ProcessLookupError):
            if pid in everyone:
                os.kill(pid, signal.SIGKILL)
                self._kills.append(time.time())

    def _weigh(self) -> None:
        """Note the most of the proportional set sizes, in which shared pages are divided up."""
        ranks = {self._rank(rank) for rank in (0, 1)} - {None}
        seen = {"ranks": 0.0, "others": 0.0}
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                kind = "ranks" if process.pid in ranks else "others"
                seen[kind] += process.memory_full_info().pss / 2**20
        if len(ranks) == 2:
            self._memory = {kind: max(mb, self._memory[kind]) for kind, mb in seen.items()}


def run(peer: Peer, plan: Plan, kept: Path) -> None:
    """Run a peer's script once; its marks, log and `run.json` are kept."""
    folder = Path(tempfile.mkdtemp(prefix="ptd-peer-"))
    running = Run(peer, plan, folder)
    try:
        running.observe()
    finally:
        running.close()
        kept.mkdir(parents=True)
        for name in ("marks", "log", "run.json"):
            if (folder / name).exists():
                shutil.copy(folder / name, kept / name)
        shutil.rmtree(folder)


def _adopt_orphans() -> None:
    """Become the parent of every orphan among the descendants, so that no daemon gets away."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
