"""The process that reads images in one way, by the interpreter that it is started with,
one plan after the other.

`python -m tests.benchmarks.read_images WAY` says {} when it is ready, then answers lines of
JSON until its stdin ends.
"""

import gc
import json
import os
import resource
import shutil
import sys
import time
from pathlib import Path
from typing import Any, TextIO

import torch

from tests.benchmarks import image_ways, other_formats


def cpu_s() -> float:
    """Return the CPU time of this process and of its children that have ended."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def read(way: str, plan: dict[str, Any]) -> dict[str, Any]:
    """Read as the plan says, epoch by epoch, with an empty folder for what the way keeps on the
    local disk."""
    shutil.rmtree(plan["scratch"], ignore_errors=True)
    Path(plan["scratch"]).mkdir()
    os.environ |= {"AWS_ACCESS_KEY_ID": plan["key"], "AWS_SECRET_ACCESS_KEY": plan["secret"]}
    began = time.perf_counter()
    epoch_of = {**image_ways.WAYS, **other_formats.WAYS}[way](plan)
    opened_s = time.perf_counter() - began
    epochs, cpus = [], []
    for _ in range(plan["epochs"]):
        began, cpu = time.perf_counter(), cpu_s()
        num = sum(len(batch[0]) for batch in epoch_of())
        epochs.append(time.perf_counter() - began)
        cpus.append(cpu_s() - cpu)
        assert num == len(plan["keys"]), f"{num} images came of {len(plan['keys'])}"
    return {"epochs": epochs, "cpu": cpus, "opened": opened_s}


def main(answers: TextIO) -> None:
    """Answer each plan."""
    torch.set_num_threads(1)
    os.environ["AWS_EC2_METADATA_DISABLED"] = "true"
    print("{}", file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(read(sys.argv[1], json.loads(line))), file=answers, flush=True)
        gc.collect()


if __name__ == "__main__":
    to_caller = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer
    main(to_caller)
