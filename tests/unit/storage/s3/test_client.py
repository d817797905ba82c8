"""When a location's client is made, and what a profile and the environment have to say."""

import gc
import os
import sys
import threading
import weakref
from pathlib import Path

import pytest

from prefect_torch_ddp.storage.s3.client import PerProcess, S3Location, connect


class Client:
    """What is made."""

    def __init__(self, location: S3Location) -> None:
        self.location = location


def test_tokens_that_change_each_hour_leave_no_clients_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each takes megabytes; one that is in use stays with its user."""
    made = PerProcess(Client)
    locations = [S3Location("bucket"), S3Location("another")]
    clients = []
    for token in range(5):
        monkeypatch.setenv("AWS_SESSION_TOKEN", str(token))
        clients += [weakref.ref(made.of(location)) for location in locations]
        assert [made.of(location) for location in locations] == [ref() for ref in clients[-2:]]
    gc.collect()
    assert [client() is not None for client in clients] == [False] * 8 + [True] * 2


def test_variables_that_others_take_away_meanwhile_disturb_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Other threads of a Dask worker set and unset theirs."""
    made, location, is_over = PerProcess(Client), S3Location("bucket"), threading.Event()
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
            assert made.of(location).location is location
    finally:
        is_over.set()
        thread.join()
        sys.setswitchinterval(interval_s)


def test_a_profile_is_respected_where_the_location_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its addressing style and checksum settings; other stores get none of the newer checksums."""
    for name in (name for name in os.environ if name.startswith("AWS_")):
        monkeypatch.delenv(name)
    config = tmp_path / "config"
    config.write_text(
        "[profile p]\nregion = eu-west-1\nrequest_checksum_calculation = when_supported\n"
        "s3 =\n  addressing_style = virtual\n"
    )
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    keys = {"access_key_id": "k", "secret_access_key": "s", "endpoint_url": "http://a:9000"}
    ours = connect(S3Location("b", profile="p", **keys)).meta.config
    assert ours.s3["addressing_style"] == "virtual"
    assert ours.request_checksum_calculation == "when_supported"
    assert ours.response_checksum_validation == "when_required"
    told = connect(S3Location("b", profile="p", addressing_style="path", **keys)).meta.config
    assert told.s3["addressing_style"] == "path"
    bare = connect(S3Location("b", region="eu-west-1", **keys)).meta.config
    assert bare.request_checksum_calculation == "when_required"
    aws = connect(S3Location("b", profile="p")).meta.config
    assert aws.response_checksum_validation == "when_supported"
