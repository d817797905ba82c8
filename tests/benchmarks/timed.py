"""What the ranks of the benchmarks do.

They load nothing else than torch: what a rank imports counts as its start.
"""

import os
import re
import time
from pathlib import Path

from tests.workloads import failing, plain


def first_step() -> float:
    """Take one optimizer step with DDP, as a resumed training does first; return when it was
    done."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(torch.nn.Linear(32, 32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(4, 32)).sum().backward()
    optimizer.step()
    return time.time()


def die_once(path: str) -> float:
    """Be killed on rank 1 in the first attempt; in the next one take a step."""
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        failing.stamp_and_die(path)
    return first_step()


def meet_and_weigh() -> tuple[float, int]:
    """Return when the first all-reduce was done, and this rank's proportional set size in kB
    while all ranks are there."""
    import torch.distributed as dist

    done = plain.time_of_first_all_reduce()
    dist.barrier()
    found = re.search(r"Pss: +(\d+) kB", Path("/proc/self/smaps_rollup").read_text())
    assert found is not None
    dist.barrier()
    return done, int(found[1])
