"""Shows when a storage's client is made, and that those of former variables aren't kept."""

import gc
import os
import sys
import threading
import weakref

import pytest

from prefect_torch_ddp.storage.s3.client import MadeOnce
from prefect_torch_ddp.storage.s3.storage import S3Storage


class Client:
    """What is made."""

    def __init__(self, storage: S3Storage) -> None:
        self.storage = storage


def test_tokens_that_change_each_hour_leave_no_clients_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each takes megabytes; one that is in use stays with its user."""
    made = MadeOnce(Client)
    storages = [S3Storage("bucket"), S3Storage("another")]
    clients = []
    for token in range(5):
        monkeypatch.setenv("AWS_SESSION_TOKEN", str(token))
        clients += [weakref.ref(made.of(storage)) for storage in storages]
        assert [made.of(storage) for storage in storages] == [client() for client in clients[-2:]]
    gc.collect()
    assert [client() is not None for client in clients] == [False] * 8 + [True] * 2


def test_variables_that_others_take_away_meanwhile_disturb_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Other threads of a Dask worker set and unset theirs."""
    made, storage, is_over = MadeOnce(Client), S3Storage("bucket"), threading.Event()
    monkeypatch.delenv("AWS_OF_ANOTHER_THREAD", raising=False)

    def flip() -> None:
        while not is_over.is_set():
            for name in ("OF_ANOTHER_THREAD", "AWS_OF_ANOTHER_THREAD"):
                os.environ[name] = "1"
                del os.environ[name]

    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    thread = threading.Thread(target=flip)
    thread.start()
    try:
        for _ in range(3_000):
            assert made.of(storage).storage is storage
    finally:
        is_over.set()
        thread.join()
        sys.setswitchinterval(interval_s)
