"""What a checkpoint of 300 MB costs a training on two ranks, compared with torch.save and
dcp.async_save; how fast it is read back."""

import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import Client

from prefect_torch_ddp import RankContext, run_gang
from prefect_torch_ddp.checkpoint.attempts import claim_attempt
from prefect_torch_ddp.params import CheckpointParams
from prefect_torch_ddp.rank.config import RankConfig
from prefect_torch_ddp.storage.directory import DirectoryStorage
from tests.benchmarks import saved
from tests.benchmarks.beside import Times, rounds, show
from tests.support.gangs import RUN_WITH_CONTEXT

pytestmark = pytest.mark.timeout(1800)
ROUNDS = rounds(9)
BETWEEN_SAVES_S = 30.0
ON_DEMAND = CheckpointParams(every_s=None)


def test_stall_of_a_save(client: Client, tmp_path: Path) -> None:
    """Print the table of docs/performance.md: medians over the rounds, the first one, which
    fills buffers, apart. With one GPU there is one rank."""
    others = tmp_path / "others"
    others.mkdir()
    storage = DirectoryStorage(tmp_path / "store")
    attempt = claim_attempt(storage, "bench")
    config = RankConfig("bench", attempt, "task", storage, checkpoint=ON_DEMAND)
    args = config, saved.in_turns, (ROUNDS + 1, str(others))
    num_ranks = min(2, torch.cuda.device_count()) or 2
    turns, *_ = run_gang(client, RUN_WITH_CONTEXT, args=args, world_size=num_ranks)
    by_way = {way: [turn[1:] for turn in turns if turn[0] == way] for way in saved.WAYS}
    quiet_s = statistics.median(rest for _, rest, _ in by_way[saved.NOTHING][1:])
    idle_s = statistics.median(stall for stall, _, _ in by_way[saved.NOTHING][1:])
    rows = []
    for way, ((first, _, _), *seen) in by_way.items():
        stall = statistics.median(stall for stall, _, _ in seen) - idle_s
        beside = statistics.median(rest for _, rest, _ in seen) - quiet_s
        unfinished = statistics.median(left for _, _, left in seen)
        worst = max(stall for stall, _, _ in seen) - idle_s
        share = (stall + max(beside, 0.0)) / BETWEEN_SAVES_S
        found = stall, worst, first - idle_s, beside, unfinished
        rows.append((way, *(f"{seconds * 1000:.0f}" for seconds in found), f"{share:.2%}"))
    head = "what | stall: median ms | worst ms | first ms | later steps longer by ms | "
    head += "write ends after them by ms | "
    show(f"{head}share of time, a save every {BETWEEN_SAVES_S:.0f} s", rows)
    steps = saved.STEPS_OF_A_TURN - 1
    print(f"\nA step takes {quiet_s / steps * 1000:.0f} ms; the later steps are {steps}.")


def evict(paths: Sequence[Path]) -> None:
    """Have the next reading come from the disk; no right is needed for it."""
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def test_verify_and_load(tmp_path: Path) -> None:
    """Print how fast 300 MB get back into a model and its optimizer, from the disk and from
    memory, compared with only reading them."""
    objects = trained()
    with RankContext.local(storage=tmp_path, checkpoint=ON_DEMAND) as ctx:
        ctx.track(**objects)
        ctx.checkpoint(force=True)
    paths = sorted((tmp_path / "runs/local/checkpoints").rglob("*.pt"))
    num_bytes = sum(path.stat().st_size for path in paths)
    times = Times()
    for _ in range(ROUNDS):
        for name, way in WAYS_TO_READ.items():
            for where in ("from the disk", "from memory"):
                with RankContext.local(storage=tmp_path, checkpoint=ON_DEMAND) as ctx:
                    evict(paths if where == "from the disk" else ())
                    began = time.perf_counter()
                    way(paths, objects, ctx)
                    times.note(f"{where}: {name}", time.perf_counter() - began)
    rows = []
    for name in sorted(times.seen):
        reference = times.median_ms(f"{name.partition(':')[0]}: {REFERENCE}")
        median = times.median_ms(name)
        speed = f"{num_bytes / median / 1e3:.0f}"
        rows.append((name, f"{median:.0f}", speed, f"{reference / median:.2f}"))
    show("what | median ms | MB/s | times only reading", rows)


def trained() -> dict[str, Any]:
    """Return a model and its optimizer, with both moments."""
    model = saved.make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(1, saved.WIDTH)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def only_read(paths: Sequence[Path], _objects: dict[str, Any], _rank: RankContext) -> None:
    """Read each file."""
    for path in paths:
        path.read_bytes()


def plain_load(paths: Sequence[Path], objects: dict[str, Any], _rank: RankContext) -> None:
    """Load each object as plain PyTorch does, unverified."""
    for path in paths:
        if path.stem in objects:
            objects[path.stem].load_state_dict(torch.load(path, weights_only=True))


def ours(_paths: Sequence[Path], objects: dict[str, Any], ctx: RankContext) -> None:
    """Choose the checkpoint, verify it and load it."""
    ctx.track(**objects)


REFERENCE = "only read"
WAYS_TO_READ = {
    REFERENCE: only_read,
    "torch.load and load_state_dict, unverified": plain_load,
    "verify and load": ours,
}
