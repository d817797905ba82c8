"""Owns the process that outlives a killed flow process: it waits on a pipe, with nothing
loaded, and then closes the run.
"""

import contextlib
import sys
import time
from uuid import UUID

TRIES = 10
RETRY_S = 5.0
"""For an API that is down just now."""


def main(flow_run_id: UUID, grace_s: float) -> None:
    """Wait until the flow's process has left its run, or is gone."""
    if sys.stdin.buffer.read():
        return
    from prefect_torch_ddp.tasks.watch.flow_watch import close  # noqa: PLC0415 - it loads Prefect: seconds and 100 MB

    for _ in range(TRIES):
        with contextlib.suppress(Exception):
            close(flow_run_id, grace_s)
            return
        time.sleep(RETRY_S)


if __name__ == "__main__":
    main(UUID(sys.argv[1]), float(sys.argv[2]))
