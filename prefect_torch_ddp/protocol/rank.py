"""What a rank process starts with, forked or not, and the orders that its agent sends it."""

import functools
import json
import os
import pickle
import site
import sys
import sysconfig
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import IO, Literal, Self

MODULE_FLAG = "-m "
"""What stands before the name of a module that is run as a script."""
ProcessGroupMode = Literal["default", "user", "none"]
Backend = Literal["auto", "gloo", "nccl"]
Launcher = Literal["auto", "exec"]


@dataclass(frozen=True)
class RankPlace:
    """Where one rank runs."""

    rank: int
    local_rank: int
    """Counted within the node."""
    node_rank: int
    """A node is a host, or a worker if the workers of the host see separate CUDA devices."""
    worker: str
    """Address of the Dask worker."""
    host: str
    address: str = ""
    """Where the other ranks reach it; the host, unless the gang was given a network."""
    visible_devices: str | None = None
    """Its CUDA_VISIBLE_DEVICES, where its own device stands at its local rank; None: its worker's,
    which names none."""


@dataclass(frozen=True)
class GangShape:
    """The sizes every rank of a gang agrees on."""

    world_size: int
    num_nodes: int
    local_world_sizes: tuple[int, ...]
    """Ranks on each node, by node rank."""


@dataclass(frozen=True)
class CodePaths:
    """The caller's import paths with the user's own code, in the caller's order."""

    first: tuple[str, ...] = ()
    """Those before Python's own and the installed packages, such as a script's folder."""
    last: tuple[str, ...] = ()

    def around(self, path: Sequence[str]) -> list[str]:
        """Return a rank's import path with those of them that are there."""
        first = [folder for folder in self.first if Path(folder).is_dir()]
        last = [folder for folder in self.last if Path(folder).is_dir() and folder not in path]
        return [*first, *(folder for folder in path if folder not in first), *last]


@functools.cache
def package_folders() -> tuple[Path, ...]:
    """Return where this Python keeps its own modules and the installed packages."""
    paths = (sysconfig.get_path("stdlib"), *site.getsitepackages(), site.getusersitepackages())
    return tuple(dict.fromkeys(Path(path).resolve() for path in paths))


def is_installed(path: str | Path) -> bool:
    """Whether a module's file is Python's own or an installed package's, not the user's own."""
    parents = {(whole := Path(path).resolve()), *whole.parents}
    return not parents.isdisjoint((*_own_folders(), *package_folders()))


@functools.cache
def _own_folders() -> tuple[Path, ...]:
    # Not the whole prefix: of Debian's Python that is /usr, and people work in /usr/src/app.
    roots = (sys.prefix, sys.base_prefix)
    below = (Path(root, name) for root in roots for name in ("bin", "lib", "lib64"))
    commands = Path(sysconfig.get_path("scripts"))  # Debian's are in /usr/local
    return tuple(dict.fromkeys(path.resolve() for path in (commands, *below)))


SAFE_LIBRARIES = ("PIL", "torchvision")
"""Libraries that a fork server may import for any gang. Their import starts no thread, opens no
file, draws nothing, doesn't touch CUDA and reads none of the variables that are each rank's own;
`test_safe_libraries_leave_a_fork_server_fit` checks it."""


@dataclass(frozen=True)
class Preload:
    """What a fork server loads for the ranks of a gang."""

    libraries: tuple[str, ...] = ()
    """Names of installed modules, in the order in which they are imported."""
    shadowed: tuple[str, ...] = ()
    """Safe libraries whose name is a module of the user's own: they must not be loaded."""

    def allows(self, library: str) -> bool:
        """Whether ranks may be forked with a library that another gang has wanted."""
        is_safe = library in SAFE_LIBRARIES and library not in self.shadowed
        return library in self.libraries or is_safe


TORCH_ALONE = Preload()


@dataclass(frozen=True)
class RankLaunch:
    """What the caller decides about a rank process."""

    place: RankPlace
    shape: GangShape
    gang_id: str
    attempt: int
    max_restarts: int
    master_addr: str
    master_port: int
    store_fd: int | None
    """An already listening socket, inherited by rank 0 in the default mode: no port is guessed."""
    process_group: ProcessGroupMode
    backend: Backend
    rendezvous_timeout_s: float
    collective_timeout_s: float | None
    agent_timeout_s: float
    """The rank ends itself when its agent has sent beats and then none for this long."""
    code_paths: CodePaths
    launcher: Launcher
    preload: Preload = TORCH_ALONE
    launched: float = field(default_factory=time.time)
    """When its gang had its workers, in Unix seconds."""


COPIES = "records"
"""The folder in `scratch` where a rank keeps copies of records that the storage lacks yet."""


@dataclass(frozen=True)
class LaunchPage:
    """What a rank process reads first: the launch, and the surroundings of a forked one."""

    launch: RankLaunch
    environment: dict[str, str]
    folder: str
    scratch: str
    """Where multiprocessing puts the rank's sockets, and the stem of its semaphores' names;
    removed when the rank has ended."""

    def write(self, file: IO[bytes], payload: bytes) -> None:
        """Write the page, then the pickled call, which only the rank opens."""
        pickle.dump(self, file)
        file.write(payload)
        file.seek(0)

    @staticmethod
    def read(launch_fd: int) -> "tuple[LaunchPage, bytes]":
        """Return the page and the pickled call; closes the file."""
        with os.fdopen(launch_fd, "rb") as file:
            return pickle.load(file), file.read()


@dataclass(frozen=True)
class RankFiles:
    """The file descriptors a rank is started with, in the order in which they are sent."""

    launch: int
    """A file with the LaunchPage."""
    events: int
    outcome: int
    control: int
    heartbeat: int
    """The page where the rank leaves its heartbeat, and its stacks when it is asked."""
    stdout: int
    stderr: int
    store: int | None = None

    def own(self) -> tuple[int, ...]:
        """Return those that the rank finds by number, in addition to its standard streams."""
        return (self.launch, self.events, self.outcome, self.control, self.heartbeat)

    def sent(self) -> tuple[int, ...]:
        """Return all there are."""
        streams = (*self.own(), self.stdout, self.stderr)
        return streams if self.store is None else (*streams, self.store)


def is_script(fn: object) -> bool:
    """Whether ranks run a file (`train.py`) or a module (`-m package.module`) as torchrun does."""
    return isinstance(fn, str) and (fn.endswith(".py") or fn.startswith(MODULE_FLAG))


class RankOrder(Enum):
    """One byte on a rank's control pipe."""

    BEAT = b"B"
    """The agent lives."""
    STOP = b"S"
    """Stop the training at the next step that all ranks agree on."""
    LEAVE = b"L"
    """All ranks have returned: end the process."""
    LOOK = b"K"
    """Write the stacks of all threads to the heartbeat's file."""


class _Message:
    def encode(self) -> bytes:
        """Return it as one packet."""
        return json.dumps(asdict(self)).encode()  # type: ignore[call-overload]  # a dataclass

    @classmethod
    def decode(cls, packet: bytes) -> Self:
        """Read a packet."""
        return cls(**json.loads(packet))


@dataclass(frozen=True)
class ForkServerOrder(_Message):
    """A Dask worker's order to its fork server.

    The file descriptors that it needs come along by SCM_RIGHTS: of a fork `RankFiles.sent()`.
    """

    op: Literal["fork", "reap", "load"]
    """load: import a library."""
    pid: int = 0
    """Whom to reap."""
    library: str = ""


@dataclass(frozen=True)
class ForkServerAnswer(_Message):
    """The fork server's answer to an order, and its first word when it is ready."""

    pid: int = 0
    """What was forked; 0 if nothing was."""
    status: int = 0
    """How a reaped process ended: its exit code, or the negated number of the signal."""
    unfit: str | None = None
    """Why forking is not safe; None if it is."""
