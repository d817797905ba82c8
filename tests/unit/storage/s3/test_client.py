"""When a location's client is made, and what a profile and the environment have to say."""

import gc
import os
import pickle
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest

from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.storage.s3.client import PerProcess, S3Location, connect
from prefect_torch_ddp.storage.s3.storage import S3Storage
from tests.support.s3_conformance import SECRET, error_of


class Client:
    """What is made."""

    def __init__(self, location: S3Location) -> None:
        self.location = location


def forget_aws(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Have this machine's settings and credentials not be found."""
    for name in (name for name in os.environ if name.startswith("AWS_")):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE", "BOTO_CONFIG"):
        monkeypatch.setenv(name, str(tmp_path / "none"))


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
    forget_aws(monkeypatch, tmp_path)
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


def test_no_credentials_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message says how to give credentials if the machine has none."""
    forget_aws(monkeypatch, tmp_path)
    storage = S3Storage("bucket", "no-credentials", endpoint_url="http://127.0.0.1:1")
    says = "there are no credentials: register an s3-bucket block"
    assert says in error_of(storage.read, "object")
    missing_profile = S3Storage("bucket", profile="no-such-profile", region="us-east-1")
    assert "no such AWS profile" in error_of(missing_profile.read, "object")


@pytest.mark.parametrize("place", ["variable", "profile"])
def test_an_endpoint_that_cannot_be_is_refused_by_name(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When it is used, without the password that it may have."""
    forget_aws(monkeypatch, tmp_path)
    endpoint = f"user:{SECRET}@localhost:9000"
    if place == "variable":
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    else:
        config = tmp_path / "config"
        config.write_text(f"[default]\nendpoint_url = {endpoint}\n")
        monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    keys = {"access_key_id": "k", "secret_access_key": "s", "region": "us-east-1"}
    with pytest.raises(
        InvalidParamsError, match=r"can't be used; write it like https://"
    ) as caught:
        S3Storage("bucket", **keys).read("object")
    assert SECRET not in str(caught.value)


def test_secrets_are_not_shown() -> None:
    """Neither repr nor str shows what a log must not hold; pickle carries it."""
    storage = S3Storage("b", access_key_id="k", secret_access_key=SECRET, session_token=SECRET)
    for text in (repr(storage), str(storage), f"{storage}", storage.uri):
        assert SECRET not in text
    assert pickle.loads(pickle.dumps(storage)).secret_access_key == SECRET


@pytest.mark.parametrize(
    ("bucket", "options"),
    [
        ("", {}),
        ("a/b", {}),
        ("b", {"access_key_id": "k"}),
        ("b", {"secret_access_key": SECRET}),
        ("b", {"anonymous": True, "access_key_id": "k", "secret_access_key": SECRET}),
        ("b", {"endpoint_url": "minio:9000"}),
        ("b", {"endpoint_url": f"http://user:{SECRET}@minio:9000"}),
    ],
)
def test_impossible_descriptions_are_refused(bucket: str, options: dict[str, Any]) -> None:
    """What can't work is refused when it is written down, without the secret."""
    with pytest.raises(InvalidParamsError) as caught:
        S3Storage(bucket, **options)
    assert SECRET not in str(caught.value)
