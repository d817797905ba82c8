"""Owns one boto3 client per storage and process, made when it is first needed.

Owns what is made once for each S3 storage in each process: clients, and what botocore was asked
about them.
"""

import os
import threading
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    from prefect_torch_ddp.storage.s3.storage import S3Storage


T = TypeVar("T")


class MadeOnce(Generic[T]):
    """Makes a thing when it is first asked for, and again when the AWS chain's variables have
    changed.
    """

    def __init__(self, make: "Callable[[S3Storage], T]", *, crosses_forks: bool = False) -> None:
        """Make nothing yet; kept for the life of the process.

        Args:
            make: makes it; one of other variables is forgotten then.
            crosses_forks: whether a forked child uses its parent's. A client can't: it shares
                its kept-alive sockets and silently returns another process's bytes. In the
                child the parent's is left alone: closed or collected it might wait for a lock
                that nobody holds there.
        """
        self._make = make
        self._crosses_forks = crosses_forks
        self._made: dict[tuple[int, S3Storage], tuple[tuple[tuple[bytes, bytes], ...], T]] = {}
        self._lock = threading.Lock()
        os.register_at_fork(after_in_child=self._renew_lock)

    def of(self, storage: "S3Storage") -> T:
        """Return this process's; threads may share it."""
        key, chain = (0 if self._crosses_forks else os.getpid(), storage), _chain()
        with self._lock:
            if key not in self._made or self._made[key][0] != chain:
                # Who still uses the one before keeps it: tokens change each hour, and a client
                # takes megabytes.
                self._made[key] = chain, self._make(storage)
            return self._made[key][1]

    def _renew_lock(self) -> None:
        self._lock = (
            threading.Lock()
        )  # a fork may happen while another thread holds it, and the child would wait for ever


def _chain() -> tuple[tuple[bytes, bytes], ...]:
    """Return the variables that the AWS chain reads: in a notebook they change under a storage
    that is the same.
    """
    names = sorted(name for name in os.environb if name.startswith(b"AWS_"))
    # Not by items(): that raises KeyError when another thread takes any variable away
    # meanwhile.
    return tuple((name, os.environb.get(name, b"")) for name in names)


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
        retries={
            "mode": "standard",
            "total_max_attempts": 1,
        },  # we try again ourselves, bodies and unreadable answers too
        s3={"addressing_style": storage.addressing_style},
        max_pool_connections=32,
        signature_version=UNSIGNED if storage.anonymous or not signs else None,
        # Stores other than AWS may not know the newer checksums; lengths are compared, and
        # checkpoints have digests of their own.
        **(
            {}
            if storage.endpoint_url is None
            else dict.fromkeys(_CHECKSUM_OPTIONS, "when_required")
        ),
    )
    return session.client(
        "s3",
        endpoint_url=storage.endpoint_url,
        region_name=storage.region,
        verify=storage.verify,
        config=config,
    )


client_of = MadeOnce(connect).of
"""Return this process's client of a storage; threads may share it."""
