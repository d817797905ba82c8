"""Shows that a finished training's model is left once: by the newest attempt, and never
replaced."""

import hashlib
import json
import math
import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from prefect_torch_ddp.checkpoint.attempts import claim_attempt
from prefect_torch_ddp.checkpoint.export import export_model
from prefect_torch_ddp.checkpoint.keys import attempts_prefix, object_key
from prefect_torch_ddp.checkpoint.manifest import Manifest, ManifestObject
from prefect_torch_ddp.checkpoint.objects import digest_of
from prefect_torch_ddp.checkpoint.serial import to_bytes
from prefect_torch_ddp.errors import CheckpointError, SupersededError
from prefect_torch_ddp.storage.directory import DirectoryStorage
from prefect_torch_ddp.storage.protocol import Storage, StoredObject

ABOUT = {"workload": "flows.digits", "options": {"lr": 0.1}, "seed": 3}
SPAWN = multiprocessing.get_context("spawn")


def checkpoint(storage: Storage, attempt: int, value: float = 1.0) -> Manifest:
    """Write a checkpoint's model of one weight, by an attempt."""
    data = to_bytes({"weight": torch.full((2, 2), value), "bias": torch.zeros(2)})
    key = object_key("run", 4, attempt, "model")
    storage.write(key, data)
    item = ManifestObject("model", key, len(data), digest_of(data))
    metrics = {"loss": 0.5, "other": math.nan}
    return Manifest("run", 4, attempt, 2, {}, 1, metrics, (item,))


def test_weights_and_a_card_of_plain_json(tmp_path: Path) -> None:
    """In the run's folder `model`, the card with all that a reader of the weights may ask
    for."""
    storage = DirectoryStorage(tmp_path)
    attempt = claim_attempt(storage, "run")
    uri = export_model(storage, checkpoint(storage, attempt), "model", attempt, ABOUT)
    assert uri == f"{tmp_path}/runs/run/model/model.safetensors"
    torch.nn.Linear(2, 2).load_state_dict(load_file(uri))
    card = json.loads(
        (tmp_path / "runs/run/model/model.json").read_bytes(), parse_constant=pytest.fail
    )
    assert card == ABOUT | {
        "file": "model.safetensors",
        "sha256": hashlib.sha256(Path(uri).read_bytes()).hexdigest(),
        "num_bytes": Path(uri).stat().st_size,
        "num_tensors": 2,
        "num_parameters": 6,
        "tracked_as": "model",
        "run_id": "run",
        "step": 4,
        "epoch": 2,
        "attempt": 1,
        "world_size": 1,
        "metrics": {"loss": 0.5, "other": "nan"},
    }


def test_a_card_takes_every_option(tmp_path: Path) -> None:
    """What JSON has no word for becomes text: after a whole training nothing may fail for
    that."""
    storage = DirectoryStorage(tmp_path)
    attempt = claim_attempt(storage, "run")
    about = {"options": {"max_norm": math.inf, 3: [math.nan, (1, Path("x"))]}}
    export_model(storage, checkpoint(storage, attempt), "model", attempt, about)
    card = json.loads(
        (tmp_path / "runs/run/model/model.json").read_bytes(), parse_constant=pytest.fail
    )
    assert card["options"] == {"max_norm": "inf", "3": ["nan", [1, "x"]]}


def test_the_same_weights_stand_and_others_get_a_folder_of_their_own(tmp_path: Path) -> None:
    """A later attempt that adds nothing finds the model there; one that trained on leaves the
    first one's as it is."""
    storage = DirectoryStorage(tmp_path)
    first = claim_attempt(storage, "run")
    found = checkpoint(storage, first)
    uri = export_model(storage, found, "model", first, ABOUT)
    before = {path: (path.stat().st_ino, path.read_bytes()) for path in Path(uri).parent.iterdir()}
    second = claim_attempt(storage, "run")
    assert export_model(storage, found, "model", second, ABOUT) == uri
    third = claim_attempt(storage, "run")
    other = export_model(storage, checkpoint(storage, third, 2.0), "model", third, ABOUT)
    assert other == f"{tmp_path}/runs/run/model/000003/model.safetensors"
    assert json.loads(Path(other).with_name("model.json").read_bytes())["attempt"] == 3
    assert before == {path: (path.stat().st_ino, path.read_bytes()) for path in before}


def test_a_model_without_its_card_is_completed(tmp_path: Path) -> None:
    """As an attempt leaves it that is killed between the two."""
    storage = DirectoryStorage(tmp_path)
    attempt = claim_attempt(storage, "run")
    found = checkpoint(storage, attempt)
    uri = export_model(storage, found, "model", attempt, ABOUT)
    card = Path(uri).with_name("model.json")
    text = card.read_bytes()
    card.unlink()
    assert export_model(storage, found, "model", claim_attempt(storage, "run"), ABOUT) == uri
    assert card.read_bytes() == text


def test_damage_is_named(tmp_path: Path) -> None:
    """Nothing is exported of an object that isn't what was written, or isn't there."""
    storage = DirectoryStorage(tmp_path)
    attempt = claim_attempt(storage, "run")
    found = checkpoint(storage, attempt)
    with pytest.raises(CheckpointError, match="step 4 of run run has no object 'net' to export"):
        export_model(storage, found, "net", attempt, ABOUT)
    damaged = replace(found, objects=(replace(found.objects[0], digest="0" * 64),))
    with pytest.raises(CheckpointError, match=r"000001/model.pt is damaged"):
        export_model(storage, damaged, "model", attempt, ABOUT)
    assert not (tmp_path / "runs/run/model").exists()


@dataclass(frozen=True)
class StopsBefore(DirectoryStorage):
    """Stops its own process, by SIGSTOP, before it does the first thing to the model's
    folder."""

    def write_if_absent(self, key: str, data: bytes) -> bool:
        """Stop, go on when told to, and write."""
        if "/model/" in key and key.endswith(".safetensors"):
            os.kill(os.getpid(), signal.SIGSTOP)
        return super().write_if_absent(key, data)


@dataclass(frozen=True)
class StopsAtClaims(DirectoryStorage):
    """Stops its own process before it looks for newer attempts."""

    def list(self, prefix: str = "") -> Iterator[StoredObject]:
        """Stop, go on when told to, and list."""
        if prefix == attempts_prefix("run"):
            os.kill(os.getpid(), signal.SIGSTOP)
        return super().list(prefix)


def export_as(storage: DirectoryStorage, manifest: Manifest, attempt: int) -> None:
    """Be an attempt, in a process of its own; end with 3 where a newer one has it."""
    try:
        export_model(storage, manifest, "model", attempt, ABOUT)
    except SupersededError:
        raise SystemExit(3) from None


@contextmanager
def stopped_attempt(
    storage: DirectoryStorage, manifest: Manifest, attempt: int
) -> "Iterator[multiprocessing.process.BaseProcess]":
    """Start an attempt, and wait until it has stopped itself."""
    process = SPAWN.Process(target=export_as, args=(storage, manifest, attempt))
    process.start()
    assert process.pid is not None
    _, status = os.waitpid(process.pid, os.WUNTRACED)
    try:
        assert os.WIFSTOPPED(status)
        yield process
    finally:
        process.kill()
        process.join(30)


@pytest.mark.parametrize("kind", [StopsBefore, StopsAtClaims])
def test_an_older_attempt_that_wakes_up_changes_nothing(
    tmp_path: Path, kind: type[DirectoryStorage]
) -> None:
    """It is stopped before it looks for newer attempts, or right after that; the newer one's
    model is what stays."""
    storage = DirectoryStorage(tmp_path)
    old = claim_attempt(storage, "run")
    with stopped_attempt(kind(tmp_path), checkpoint(storage, old), old) as process:
        new = claim_attempt(storage, "run")
        uri = export_model(storage, checkpoint(storage, new, 2.0), "model", new, ABOUT)
        left = {path: path.read_bytes() for path in Path(uri).parent.glob("model.*")}
        os.kill(process.pid or 0, signal.SIGCONT)
        process.join(60)
        assert process.exitcode == 3
    assert uri == f"{tmp_path}/runs/run/model/model.safetensors"
    assert left == {path: path.read_bytes() for path in Path(uri).parent.iterdir()}
    assert len(left) == 2
