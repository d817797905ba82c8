"""deployments/register_blocks.py on a real Prefect server: called again it changes what is
there; a bucket on Ceph is reached."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from prefect.client.orchestration import get_client

from prefect_torch_ddp import StorageError
from prefect_torch_ddp.tasks.blocks import resolve_storage
from tests.support.s3_server import S3Server

ROOT = Path(__file__).parents[3]

pytestmark = [pytest.mark.extended, pytest.mark.usefixtures("prefect_api")]


def register(**variables: str) -> subprocess.CompletedProcess[str]:
    """Call it as people do."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "S3_"))
    }
    command = [sys.executable, str(ROOT / "deployments" / "register_blocks.py")]
    return subprocess.run(
        command,
        check=False,
        capture_output=True,
        text=True,
        env=environment | variables,
        timeout=120,
    )


def blocks() -> dict[str, Any]:
    """Return every block that is on the server: its id by its name, also of those without a
    name."""
    with get_client(sync_client=True) as client:
        found = client.read_block_documents(include_secrets=False)
    return {f"{block.block_type_name}/{block.name or block.id}": block.id for block in found}


def test_called_again_it_changes_what_is_there(ceph_server: S3Server) -> None:
    """Twice the same: the same blocks, by their ids.

    With other keys and another folder: these, in the same blocks.
    """
    key, secret = ceph_server.keys["owner"]
    place = {
        "S3_BUCKET": ceph_server.bucket,
        "S3_BLOCK_NAME": "registered",
        "AWS_ENDPOINT_URL": ceph_server.endpoint_url,
    }
    first = register(**place, S3_FOLDER="one", AWS_ACCESS_KEY_ID=key, AWS_SECRET_ACCESS_KEY="wrong")
    assert first.returncode == 0, first.stderr
    assert 'params={"storage": "s3-bucket/registered"}' in first.stdout
    there = blocks()
    assert {"S3 Bucket/registered", "AWS Credentials/registered-credentials"} <= there.keys()
    with pytest.raises(StorageError, match="the secret is wrong"):
        resolve_storage("s3-bucket/registered").check_writable()
    for folder in ("one", "two", "two"):
        again = register(
            **place, S3_FOLDER=folder, AWS_ACCESS_KEY_ID=key, AWS_SECRET_ACCESS_KEY=secret
        )
        assert again.returncode == 0, again.stderr
        assert secret not in again.stdout + again.stderr
        assert blocks() == there
        storage = resolve_storage("s3-bucket/registered")
        assert storage.uri == f"s3://{ceph_server.bucket}/{folder}"
        storage.check_writable()


def test_what_is_missing_is_named_and_nothing_is_registered() -> None:
    """No bucket, half of a key: the message names the variable, and shows no secret."""
    there = blocks()
    for variables, missing in (
        ({}, "S3_BUCKET"),
        ({"S3_BUCKET": "b", "AWS_SECRET_ACCESS_KEY": "hunter2"}, "AWS_ACCESS_KEY_ID"),
    ):
        done = register(**variables)
        assert done.returncode != 0
        assert missing in done.stderr
        assert "hunter2" not in done.stdout + done.stderr
    assert blocks() == there
