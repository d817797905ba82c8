"""A storage never answers: the user's failure comes first, and a training continues."""

import atexit
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from distributed import Client

from prefect_torch_ddp import RankFailedError, run_gang
from prefect_torch_ddp.checkpoint.manifest import list_manifests
from prefect_torch_ddp.gang import liveness
from prefect_torch_ddp.params import CheckpointParams
from prefect_torch_ddp.protocol.events import GangEvent
from prefect_torch_ddp.rank.config import RankConfig
from prefect_torch_ddp.storage.s3.storage import S3Storage
from prefect_torch_ddp.tracking.attempt_log import RunAttemptLog
from tests.support.gangs import RUN_WITH_CONTEXT
from tests.support.records import read_records
from tests.support.s3_server import Exchange, Fault, S3Server, Wire
from tests.support.waiting import HANG_S, wait_until
from tests.workloads import stored

pytestmark = pytest.mark.extended


@contextmanager
def silenced_by(folder: Path, server: S3Server, **changes: Any) -> Iterator[S3Storage]:
    """Give a storage that is silent while a file `silent` exists, and makes `asked` if asked."""
    over = threading.Event()

    def say_nothing(_handler: BaseHTTPRequestHandler, _exchange: Exchange) -> None:
        (folder / "asked").touch()
        while (folder / "silent").exists() and not over.wait(0.05):
            pass

    def outage() -> Fault | None:
        return say_nothing if (folder / "silent").exists() else None

    before = set(threading.enumerate())
    with Wire(server.endpoint_url, outage=outage) as wire:
        try:
            yield replace(server.storage(), endpoint_url=wire.endpoint_url, **changes)
        finally:
            over.set()
    for thread in threading.enumerate():
        if thread not in before and "time budget" in thread.name:
            thread.join(HANG_S)
            assert not thread.is_alive()


def run(
    client: Client, storage: S3Storage, folder: Path, how: str, events: list[GangEvent]
) -> list[int]:
    """Train on two ranks; checkpoints are made when asked for."""

    def arguments(attempt: int) -> tuple[Any, ...]:
        config = RankConfig(
            "run", attempt, "task", storage, checkpoint=CheckpointParams(every_s=None)
        )
        return config, stored.train_beside_silence, (str(folder), how)

    attempt_log = RunAttemptLog(storage, "run", knows_steps=True)
    return run_gang(
        client,
        RUN_WITH_CONTEXT,
        args=arguments,
        attempt_log=attempt_log,
        world_size=2,
        on_event=events.append,
    )


def _fail_and_linger(folder: str) -> None:
    atexit.register(time.sleep, HANG_S)
    print("the last line", flush=True)
    Path(folder, "silent").touch()
    msg = "told to fail"
    raise ValueError(msg)


@pytest.mark.long
def test_a_rank_that_lingers_and_a_silent_storage_take_no_line_from_the_log(
    dask_client: Client,
    open_s3_server: S3Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The caller waits ten seconds for an agent that both of them hold up."""
    monkeypatch.setattr(liveness, "STORAGE_LIMIT_S", 5.0)
    events: list[GangEvent] = []
    call = {"world_size": 1, "process_group": "none", "on_event": events.append}
    with silenced_by(tmp_path, open_s3_server) as storage:
        call["attempt_log"] = RunAttemptLog(storage, "run", knows_steps=True)
        with pytest.raises(RankFailedError, match="ValueError: told to fail"):
            run_gang(dask_client, _fail_and_linger, args=(str(tmp_path),), **call)
    said = texts(events)
    assert "it is killed 5 s after its failure: its exit handlers" in said
    assert "its log in the storage lacks lines" in said
    assert "were not gone" not in caplog.text


def texts(events: list[GangEvent]) -> str:
    """Return all log texts."""
    return "\n".join(str(getattr(event, "text", "")) for event in events)


@pytest.mark.long
def test_the_error_comes_first(
    dask_client: Client, open_s3_server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error arrives while checkpoint and records wait minutes for the storage."""
    monkeypatch.setattr(liveness, "STORAGE_LIMIT_S", 5.0)
    monkeypatch.setattr(liveness, "STORAGE_QUIET_S", 1.0)
    events: list[GangEvent] = []
    with silenced_by(tmp_path, open_s3_server) as storage:
        assert storage.read_timeout_s == 60
        with pytest.raises(
            RankFailedError, match=r"rank 1 on 127.0.0.1 failed in attempt 1: ValueError: a bug of"
        ) as caught:
            run(dask_client, storage, tmp_path, "fails", events)
    assert isinstance(caught.value.__cause__, ValueError)
    said = texts(events)
    assert 'failed: ValueError("a bug of the user\'s"); it waits at most 5 s' in said
    assert "a bug of the user's\nthe storage has not answered for 1 s" in said.replace("\n\n", "\n")
    assert (
        "the failure of attempt 1 could not be recorded: the storage was silent for too long"
        in said
    )


def test_a_training_goes_on_beside_a_silent_storage(
    dask_client: Client, open_s3_server: S3Server, tmp_path: Path
) -> None:
    """A save that hangs holds up no step, a warning names its object, and the next save works."""
    events: list[GangEvent] = []
    failures: list[BaseException] = []

    def speak_again() -> None:
        try:
            wait_until(
                lambda: (
                    (tmp_path / "on").exists() and "no checkpoint of step 4" in texts(list(events))
                )
            )
            (tmp_path / "silent").unlink()
        except BaseException as error:  # noqa: BLE001 - the test shall show it
            failures.append(error)

    with silenced_by(tmp_path, open_s3_server, read_timeout_s=1.0, max_attempts=2) as storage:
        thread = threading.Thread(target=speak_again)
        thread.start()
        values = run(dask_client, storage, tmp_path, "goes on", events)
        thread.join()
    assert not failures
    assert values == [12, 12]
    direct = replace(storage, endpoint_url=open_s3_server.endpoint_url)
    assert [manifest.step for manifest in list_manifests(direct, "run")] == [10, 12]
    said = texts(events)
    assert "no checkpoint of step 4, the one before it stays the newest: " in said
    assert "runs/run/checkpoints/step-00000004/000001/" in said
    assert "didn't answer in time" in said
    assert [record.step for record in read_records(direct, "run") if record.rank == 0] == list(
        range(1, 13)
    )
