"""botocore's client of an S3 location, one in each process."""

import os
import threading
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from prefect_torch_ddp.storage.s3.location import S3Location

T = TypeVar("T")

_CHECKSUM_OPTIONS = ("request_checksum_calculation", "response_checksum_validation")


class PerProcess(Generic[T]):
    """Makes a thing for a location once in a process.

    A forked child never uses its parent's: a client would share its kept-alive sockets and
    silently return another process's bytes. Nor is it closed there, or collected: it might wait
    for a lock that nobody holds in the child.
    """

    def __init__(self, make: Callable[[S3Location], T]) -> None:
        self._make = make
        self._made: dict[tuple[int, S3Location], T] = {}
        self._lock = threading.Lock()
        os.register_at_fork(after_in_child=self._renew_lock)

    def of(self, location: S3Location) -> T:
        """Return this process's; threads may share it."""
        key = os.getpid(), location
        with self._lock:
            if key not in self._made:
                self._made[key] = self._make(location)
            return self._made[key]

    def _renew_lock(self) -> None:
        # A fork may happen while another thread holds it, and the child would wait forever.
        self._lock = threading.Lock()


def session_of(location: S3Location) -> Any:
    """Make botocore's session, which finds credentials and settings."""
    from botocore.session import Session  # noqa: PLC0415 - half a second; many only name a storage

    session = Session(profile=location.profile)
    if location.access_key_id is not None:
        keys = location.access_key_id, location.secret_access_key, location.session_token
        session.set_credentials(*keys)
    return session


def connect(location: S3Location) -> Any:
    """Make a client whose answers say where they came from, in `ResponseMetadata["Route"]`."""
    from botocore import UNSIGNED  # noqa: PLC0415 - as above
    from botocore.config import Config  # noqa: PLC0415

    session, style = session_of(location), location.addressing_style
    config = Config(
        connect_timeout=location.connect_timeout_s,
        read_timeout=location.read_timeout_s,
        # We try again ourselves, bodies and unreadable answers too.
        retries={"mode": "standard", "total_max_attempts": 1},
        s3=None if style is None else {"addressing_style": style},
        max_pool_connections=32,
        signature_version=UNSIGNED if location.anonymous else None,
        **_checksums(location, session.get_scoped_config()),
    )
    client = session.create_client(
        "s3",
        endpoint_url=location.endpoint_url,
        region_name=location.region,
        verify=location.verify,
        config=config,
    )
    client.meta.events.register("after-call.s3", _note_route)
    return client


def _checksums(location: S3Location, profile: Mapping[str, Any]) -> dict[str, str]:
    """Leave out the newer checksums, which stores other than AWS may not know.

    Lengths are compared all the same, and checkpoints have digests of their own.
    """
    if location.endpoint is None:
        return {}
    chosen = {*profile, *(name.removeprefix("AWS_").lower() for name in os.environ)}
    return {name: "when_required" for name in _CHECKSUM_OPTIONS if name not in chosen}


def _note_route(http_response: Any, parsed: Any, context: Any, **_: Any) -> None:
    signing = {"auth_type": context.get("auth_type"), **context.get("signing", {})}
    parsed.setdefault("ResponseMetadata", {})["Route"] = http_response.url, signing


client_of = PerProcess(connect).of
"""Return this process's client of a location; threads may share it."""
