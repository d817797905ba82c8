"""What the ranks of the benchmarks do.

They load nothing else than torch: what a rank imports counts as its start.
"""

import os
import time

from tests.workloads import failing


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
