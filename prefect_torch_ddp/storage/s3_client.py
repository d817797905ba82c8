"""Owns one boto3 client per storage and process, made when it is first needed."""

import os
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prefect_torch_ddp.storage.s3 import S3Storage

_CHECKSUM_OPTIONS = ("request_checksum_calculation", "response_checksum_validation")

# A client that crosses a fork shares its kept-alive sockets and silently returns another process's bytes: hence the process id.
# In the child the parent's clients are left alone.
_clients: "dict[tuple[int, S3Storage], Any]" = {}
_lock = threading.Lock()


def client_of(storage: "S3Storage") -> Any:
    """Return this process's client; threads may share it."""
    process_and_storage = os.getpid(), storage
    with _lock:
        if process_and_storage not in _clients:
            _clients[process_and_storage] = _connect(storage)
        return _clients[process_and_storage]


def _connect(storage: "S3Storage") -> Any:
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
        retries={"mode": "standard", "total_max_attempts": storage.max_attempts},
        s3={"addressing_style": storage.addressing_style},
        max_pool_connections=32,
        signature_version=UNSIGNED if storage.anonymous else None,
        # Stores other than AWS may not know the newer checksums; lengths are compared, and checkpoints carry their own sha256.
        **({} if storage.endpoint_url is None else dict.fromkeys(_CHECKSUM_OPTIONS, "when_required")),
    )
    return session.client(
        "s3", endpoint_url=storage.endpoint_url, region_name=storage.region, verify=storage.verify, config=config
    )


def _renew_lock() -> None:
    global _lock  # noqa: PLW0603 - a fork may happen while another thread holds it, and the child would wait for ever
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)
