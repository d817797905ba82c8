"""Owns one boto3 client per storage and process, made when it is first needed."""

from typing import TYPE_CHECKING, Any

from prefect_torch_ddp.storage.made_once import MadeOnce

if TYPE_CHECKING:
    from prefect_torch_ddp.storage.s3 import S3Storage

_CHECKSUM_OPTIONS = ("request_checksum_calculation", "response_checksum_validation")


def connect(storage: "S3Storage", *, signs: bool = True) -> Any:
    """Make a client.

    Args:
        storage: says which.
        signs: whether it needs credentials and uses them.
    """
    from boto3.session import Session  # noqa: PLC0415 - boto3 takes half a second, and many only name a storage
    from botocore import UNSIGNED  # noqa: PLC0415
    from botocore.config import Config  # noqa: PLC0415

    session = Session(
        aws_access_key_id=storage.access_key_id,
        aws_secret_access_key=storage.secret_access_key,
        aws_session_token=storage.session_token,
        profile_name=storage.profile,
    )
    config = Config(
        connect_timeout=storage.connect_timeout_s,
        read_timeout=storage.read_timeout_s,
        retries={"mode": "standard", "total_max_attempts": 1},  # we try again ourselves, bodies and unreadable answers too
        s3={"addressing_style": storage.addressing_style},
        max_pool_connections=32,
        signature_version=UNSIGNED if storage.anonymous or not signs else None,
        # Stores other than AWS may not know the newer checksums; lengths are compared, and checkpoints have digests of their own.
        **({} if storage.endpoint_url is None else dict.fromkeys(_CHECKSUM_OPTIONS, "when_required")),
    )
    return session.client(
        "s3", endpoint_url=storage.endpoint_url, region_name=storage.region, verify=storage.verify, config=config
    )


client_of = MadeOnce(connect).of
"""Return this process's client of a storage; threads may share it."""
