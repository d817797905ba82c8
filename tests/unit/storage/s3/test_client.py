"""What a profile and the environment have to say about a location's client."""

import os
from pathlib import Path

import pytest

from prefect_torch_ddp.storage.s3.client import S3Location, connect


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
