"""Owns the start of a rank as a fresh process: what an agent runs where ranks can't be forked
from a rank host.
"""

import sys
from collections.abc import Sequence

from prefect_torch_ddp.protocol.rank import LaunchPage
from prefect_torch_ddp.rank import main as life


def main(arguments: Sequence[str]) -> None:
    """Run one rank."""
    launch_fd, *fds, parent_pid = map(int, arguments)
    life.live(fds, parent_pid, *LaunchPage.read(launch_fd))


if __name__ == "__main__":
    main(sys.argv[1:])
