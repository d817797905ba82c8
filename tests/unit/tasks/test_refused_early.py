"""What a call of train_flow refuses before Prefect starts a server and makes a flow run."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from prefect_torch_ddp import (
    DirectoryStorage,
    InvalidParamsError,
    PrefectTorchDdpError,
    TrainParams,
    train_flow,
)
from prefect_torch_ddp.records.run_record import write_run_record
from tests.support.pages import RECORD

Call = Callable[[], object]

DIGITS = "prefect_torch_ddp.examples.digits"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"options": {"epoch": 3}}, r"did you mean epochs\?"),
        ({"storage": "ftp://x"}, "ftp: names no known storage"),
        ({"storage": "S3-bucket/x"}, "S3-bucket/x names no block"),
        ({"storage": "FILE/runs"}, r"can't write \S+: Not a directory; a file stands where"),
        ({"source": "nowhere"}, "there is no folder"),
        ({"source": "http://host/raw.zip"}, "isn't read by http:"),
        ({"storage": "s3://bucket", "trackers": ["tensorboard"]}, "set TENSORBOARD_LOGGING_DIR"),
        ({"resume_from": "no-such-run"}, "store holds no complete checkpoint of run no-such-run"),
    ],
)
def test_a_call_of_train_flow_is_refused_before_a_server_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], says: str
) -> None:
    """A script started a temporary one, made a failed run in Prefect, and said it three times."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TENSORBOARD_LOGGING_DIR", raising=False)
    Path("FILE").touch()
    before = temporary_servers()
    with pytest.raises(PrefectTorchDdpError, match=says):
        train_flow(TrainParams(**{"workload": DIGITS, "storage": "store", **given}))
    assert temporary_servers() == before
    assert [each.name for each in tmp_path.iterdir()] == ["FILE"]


def test_a_run_to_resume_from_that_is_misspelt_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of those in the storage."""
    monkeypatch.chdir(tmp_path)
    write_run_record(DirectoryStorage("store"), RECORD)
    near = RECORD.run_id[:-1]
    with pytest.raises(InvalidParamsError, match=f"; did you mean {RECORD.run_id}\\?"):
        train_flow(TrainParams(workload=DIGITS, storage="store", resume_from=near))


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: train_flow(workload=DIGITS), "train_flow has no argument workload: write train_f"),
        (lambda: train_flow(DIGITS), r"takes one TrainParams: write train_flow\(TrainParams\(work"),
        (lambda: train_flow(TrainParams(), TrainParams()), "takes one TrainParams"),
        (lambda: train_flow({"worldsize": 3}), r"no option worldsize; did you mean world_size\?"),
        (lambda: train_flow(params={"options": 3}), "options is 3; it should be a valid dict"),
        (
            lambda: train_flow({"workload": temporary_servers}),
            "workload is temporary_servers; give",
        ),
        (lambda: train_flow({"cluster": "tcp://a:1"}), r'cluster=\{"address": "tcp://a:1"\}'),
    ],
    ids=[
        "its fields",
        "a name",
        "two",
        "an unknown field",
        "a wrong value",
        "a function",
        "an address",
    ],
)
def test_a_call_with_other_arguments_says_how_to_write_it(call: Call, says: str) -> None:
    """Prefect's error had 25 lines, and the whole signature."""
    before = temporary_servers()
    with pytest.raises(InvalidParamsError, match=says):
        call()
    assert temporary_servers() == before


def temporary_servers() -> list[Any]:
    """Return those that Prefect has started in this process."""
    module = sys.modules.get("prefect.server.api.server")
    return list(module.SubprocessASGIServer._instances) if module else []
