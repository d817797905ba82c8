"""What a call of train_flow refuses before Prefect starts a server and makes a flow run."""

import sys
from pathlib import Path
from typing import Any

import pytest

from prefect_torch_ddp import PrefectTorchDdpError, TrainParams, train_flow

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


def temporary_servers() -> list[Any]:
    """Return those that Prefect has started in this process."""
    module = sys.modules.get("prefect.server.api.server")
    return list(module.SubprocessASGIServer._instances) if module else []
