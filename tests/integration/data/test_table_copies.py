"""Local copies of tables among real processes: decoded once, killed at it, trained on."""

import faulthandler
import multiprocessing
import os
import pickle
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch

from prefect_torch_ddp import RankContext
from prefect_torch_ddp.data import table
from prefect_torch_ddp.data.tables import pieces as tables_pieces
from prefect_torch_ddp.gang.caller.verdict.stall import awaits_data, makes_data
from prefect_torch_ddp.records.ledger import read_ledger
from prefect_torch_ddp.storage.directory import DirectoryStorage
from prefect_torch_ddp.storage.protocol import Contents, ListedObject, ObjectPart, Readable, Storage
from tests.support.killed import check_killed_and_resumed, train_or_die
from tests.support.ranks import config_for, train_on
from tests.support.waiting import wait_until
from tests.unit.data.tables.parquet_files import noisy_batches, numbered, walk
from tests.unit.data.test_loader import loader_of

pytestmark = pytest.mark.timeout(200)
NUM_ROWS, BATCH = 150, 16
NUM_STEPS = 20
SIZES = [70, 0, 80]
FIRST_ROWS = 4
"""Where a file's first row group begins, after the magic bytes."""


@dataclass(frozen=True)
class Gated(Readable):
    """A folder of Parquet files that notes each read, and keeps rows of its last file back until
    `gate` exists."""

    folder: Path
    reads: Path
    gate: Path

    @property
    def uri(self) -> str:
        return str(self.folder)

    def read_many(self, parts: Sequence[ObjectPart]) -> Contents:
        with self.reads.open("a") as file:
            file.writelines(f"{part.key} {part.start} {part.num_bytes}\n" for part in parts)
        if any(part.key == "002.parquet" and part.start == FIRST_ROWS for part in parts):
            wait_until(self.gate.exists)
        return DirectoryStorage(self.folder).read_many(parts)

    def list_objects(self, prefix: str) -> Iterator[ListedObject]:
        return DirectoryStorage(self.folder).list_objects(prefix)


@pytest.fixture
def source(tmp_path: Path) -> Gated:
    """Give a table of several pieces, some of which can't be read yet."""
    folder = numbered(tmp_path / "table", SIZES, 5)
    return Gated(folder, tmp_path / "reads", tmp_path / "gate")


def read_whole(source: Gated, copies: Path) -> None:
    """Open the copy, and compare its rows."""
    with (copies.parent / f"{os.getpid()}.stack").open("w") as file:
        faulthandler.register(signal.SIGUSR1, file=file)
        _read_whole(source, copies)
        faulthandler.unregister(signal.SIGUSR1)


def _read_whole(source: Gated, copies: Path) -> None:
    tables_pieces.PIECE_ROWS = 8
    (batch,) = loader_of(table(source, local_copy=copies), NUM_ROWS, shuffle=False)
    assert batch["number"].tolist() == list(range(NUM_ROWS))
    assert batch["half"].tolist() == [n / 2 for n in range(NUM_ROWS)]


def begin(source: Gated, copies: Path) -> BaseProcess:
    """Start a process that reads the copy."""
    process = multiprocessing.get_context("fork").Process(target=read_whole, args=(source, copies))
    process.start()
    return process


def waits_for_lock(pid: int) -> bool:
    """Tell whether the kernel has a process wait for a flock."""
    lines = Path("/proc/locks").read_text().splitlines()
    return any("-> FLOCK" in line and f" {pid} " in line for line in lines)


def unfinished(copies: Path) -> list[Path]:
    """Return the folders in which copies are made."""
    return [path for path in copies.glob(".staging/*") if path.is_dir()]


def has_begun(copies: Path) -> bool:
    """Tell whether rows were written."""
    return any(path.stat().st_size > 1000 for path in copies.glob(".staging/*/copy/*.npy"))


def test_processes_of_one_host_decode_once(source, tmp_path) -> None:
    """Of four that ask at once one decodes, and the others wait for its lock."""
    copies = tmp_path / "copies"
    first = begin(source, copies)
    wait_until(lambda: has_begun(copies))
    others = [begin(source, copies) for _ in range(3)]
    wait_until(lambda: all(waits_for_lock(each.pid) for each in others))
    source.gate.touch()
    for process in (first, *others):
        process.join(60)
        assert process.exitcode == 0
    reads = source.reads.read_text().splitlines()
    assert len(set(reads)) == len(reads) > 2
    assert not unfinished(copies)


def test_a_process_killed_while_it_decodes_leaves_nothing_that_counts(source, tmp_path) -> None:
    """The one that waits for it begins again, and what the killed one wrote is removed."""
    copies = tmp_path / "copies"
    killed = begin(source, copies)
    wait_until(lambda: has_begun(copies))
    (left,) = unfinished(copies)
    waiting = begin(source, copies)
    wait_until(lambda: waits_for_lock(waiting.pid))
    os.kill(killed.pid, signal.SIGKILL)
    killed.join(60)
    source.gate.touch()
    waiting.join(60)
    assert (killed.exitcode, waiting.exitcode) == (-signal.SIGKILL, 0)
    assert not left.exists()
    assert not unfinished(copies)
    num_reads = len(source.reads.read_text().splitlines())
    read_whole(source, copies)
    assert len(source.reads.read_text().splitlines()) == num_reads


def test_a_killed_writer_that_nobody_awaited_is_cleaned_up_after(source, tmp_path) -> None:
    """By the next process that makes the copy."""
    copies = tmp_path / "copies"
    killed = begin(source, copies)
    wait_until(lambda: has_begun(copies))
    os.kill(killed.pid, signal.SIGKILL)
    killed.join(60)
    assert unfinished(copies)
    source.gate.touch()
    read_whole(source, copies)
    assert not unfinished(copies)


def stack_of(process: BaseProcess, path: Path) -> str:
    """Have a process of `begin` write its stacks, as a rank does that is asked for them."""
    os.kill(process.pid, signal.SIGUSR1)
    wait_until(lambda: path.exists() and "test_table_copies.py" in path.read_text())
    return path.read_text()


def test_the_watch_for_hangs_knows_who_decodes_and_who_waits(source, tmp_path) -> None:
    """By real stacks, so a function that is renamed shows here."""
    copies = tmp_path / "copies"
    decoding = begin(source, copies)
    wait_until(lambda: has_begun(copies))
    waiting = begin(source, copies)
    wait_until(lambda: waits_for_lock(waiting.pid))
    stacks = [stack_of(each, tmp_path / f"{each.pid}.stack") for each in (decoding, waiting)]
    assert [makes_data(stack) for stack in stacks] == [True, False]
    assert [awaits_data(stack) for stack in stacks] == [False, True]
    source.gate.touch()
    for process in (decoding, waiting):
        process.join(60)
        assert process.exitcode == 0


@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.more)])
def test_loader_workers_give_the_same_batches(context, tmp_path) -> None:
    """Workers are forked with the copy mapped, or spawned and map it themselves."""
    rows = table(numbered(tmp_path / "table", SIZES, 5), local_copy=tmp_path / "copies")
    expected = walk(rows, BATCH, 2)
    assert walk(rows, BATCH, 2, num_workers=2, multiprocessing_context=context) == expected
    assert walk(pickle.loads(pickle.dumps(rows)), BATCH, 2) == expected


def test_what_collate_fn_draws_is_the_same_for_any_number_of_workers(tmp_path) -> None:
    """The generators are seeded for each batch."""
    folder = numbered(tmp_path / "table", [64], 8)
    rows = table(folder, ["number"], local_copy=tmp_path / "copies")
    assert noisy_batches(rows, 16, num_workers=1) == noisy_batches(rows, 16, num_workers=2)


def seen_by(ctx: RankContext, folder: Path, copies: Path) -> list[list[int]]:
    """Return the rows of each step of two epochs on this rank."""
    rows = table(folder, features=["half"], target="number", local_copy=copies)
    loader = ctx.loader(rows, global_batch_size=BATCH)
    return [y.tolist() for _, y in ctx.steps(loader, epochs=2)]


def test_ranks_have_the_same_global_batches_for_any_number_of_them(tmp_path) -> None:
    """One, two and four gloo ranks; all rows are shuffled, in another order in each epoch."""
    folder, copies = numbered(tmp_path / "table", [80, 80], 5), tmp_path / "copies"

    def batches(world: int) -> list[list[int]]:
        ranks = train_on(world, config_for(tmp_path / str(world)), seen_by, folder, copies)
        return [[n for own in step for n in own] for step in zip(*ranks, strict=True)]

    whole = batches(1)
    assert batches(2) == batches(4) == whole
    epochs = [[n for batch in some for n in batch] for some in (whole[:10], whole[10:])]
    assert epochs[0] != epochs[1]
    assert all(sorted(epoch) == list(range(160)) for epoch in epochs)


def train(ctx: RankContext, where: tuple[Storage, Path], kill_at: int | None) -> dict[str, Any]:
    """Train on a copy."""
    rows = table(where[0], features=["half"], target="number", local_copy=where[1])
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))

    def loss_of(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        x, y = batch
        return torch.nn.functional.mse_loss(model(x / 75)[:, 0], y.float() / 150)

    return train_or_die(ctx, ctx.loader(rows, global_batch_size=BATCH), net, loss_of, kill_at)


@pytest.mark.extended
@pytest.mark.parametrize("kind", [pytest.param("directory", marks=pytest.mark.more), "s3"])
def test_on_a_copy_a_killed_training_ends_with_the_undisturbed_weights(
    kind, tmp_path, s3_server
) -> None:
    """Two ranks are killed twice, and the ledger counts every row once an epoch."""
    folder = DirectoryStorage(numbered(tmp_path / "table", SIZES, 5))
    struck: Storage = folder
    if kind == "s3":
        struck = s3_server.storage()
        for item in folder.list():
            struck.write(item.key, folder.read(item.key))
    places = (folder, tmp_path / "copies"), (struck, tmp_path / "other copies")
    assert check_killed_and_resumed(tmp_path, train, *places, (5, 14)) == NUM_STEPS
    report = read_ledger(DirectoryStorage(tmp_path / "runs"), "run")
    assert str(report).splitlines() == [
        f"epoch {epoch}: {NUM_ROWS} samples, each once" for epoch in (1, 2)
    ]


@pytest.mark.extended
def test_with_elastic_determinism_the_number_of_ranks_doesnt_matter(tmp_path) -> None:
    """Four, two and one killed ranks end with the bits of one undisturbed rank."""
    elastic = {"determinism": "elastic", "virtual_ranks": 4, "ledger": True}
    where = DirectoryStorage(numbered(tmp_path / "table", SIZES, 5)), tmp_path / "copies"
    calm = train_on(1, config_for(tmp_path / "calm", **elastic), train, where, None)
    for size, kill_at in ((4, 4), (2, 9), (1, 13)):
        train_on(size, config_for(tmp_path / "runs", **elastic), train, where, kill_at)
    ended = train_on(4, config_for(tmp_path / "runs", **elastic), train, where, None)
    assert {value["sha256"] for value in ended} == {calm[0]["sha256"]}
    assert read_ledger(DirectoryStorage(tmp_path / "runs"), "run").is_clean
