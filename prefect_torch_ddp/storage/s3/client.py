"""The location of an S3 storage, and botocore's client of it, one in each process."""

import os
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Generic, Literal, TypeAlias, TypeVar
from urllib.parse import urlsplit

from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.lazy import exported_by
from prefect_torch_ddp.storage.names import check_key

T = TypeVar("T")
Settings: TypeAlias = tuple[tuple[bytes, bytes], ...]

_FILES = (
    ("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials"),
    ("AWS_CONFIG_FILE", "~/.aws/config"),
)
"""Of AWS's tools: the variable that names each, and where it is otherwise."""
_CHECKSUM_OPTIONS = ("request_checksum_calculation", "response_checksum_validation")


@exported_by("prefect_torch_ddp")
@dataclass(frozen=True)
class S3Location:
    """A bucket, a prefix and how to get there.

    Whatever isn't given is looked up as AWS's own tools do.
    """

    bucket: str
    prefix: str = ""
    _: KW_ONLY
    endpoint_url: str | None = None
    region: str | None = None
    profile: str | None = None
    access_key_id: str | None = field(default=None, repr=False)
    secret_access_key: str | None = field(default=None, repr=False)
    session_token: str | None = field(default=None, repr=False)
    anonymous: bool = False
    verify: bool | str | None = None
    """Whether certificates are checked, or the path of a CA bundle."""
    addressing_style: Literal["auto", "path", "virtual"] | None = None
    """None: as the profile says, else botocore's own choice."""
    connect_timeout_s: float = 10.0
    read_timeout_s: float = 60.0
    max_attempts: int = 5
    give_up_after_s: float = 100.0
    """No request is repeated later than this after its first try."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "prefix", self.prefix.strip("/"))
        if self.prefix:
            check_key(self.prefix)
        if (fault := self._fault()) is not None:
            raise InvalidParamsError(fault)

    @property
    def uri(self) -> str:
        """The root as `s3://bucket/prefix`."""
        return f"s3://{self.bucket}/{self.prefix}".rstrip("/")

    @property
    def endpoint(self) -> str | None:
        """The endpoint that the location or the environment names; None: AWS's."""
        variables = map(os.environ.get, ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"))
        return self.endpoint_url or next(filter(None, variables), None)

    def name_of(self, key: str) -> str:
        """Return the whole name in the bucket; the key may be any name that is found there."""
        return f"{self.prefix}/{key}" if self.prefix else key

    def where(self, name: str) -> str:
        """Say where the object of a whole name is, in words that hold no secret."""
        return f"s3://{self.bucket}/{name} at {(self.endpoint or 'AWS').rpartition('@')[2]}"

    def _fault(self) -> str | None:
        if not self.bucket or "/" in self.bucket:
            return f"{self.bucket!r} can't be the name of a bucket; write s3://bucket/prefix"
        if (self.access_key_id is None) != (self.secret_access_key is None):
            return (
                f"{self.uri} has one of access_key_id and secret_access_key; give both, "
                "or none to use this machine's credentials"
            )
        if self.anonymous and (self.access_key_id or self.profile):
            return (
                f"{self.uri} is to be used anonymously and has credentials; give one or the other"
            )
        parts = urlsplit(self.endpoint_url or "https://aws")
        if parts.scheme not in {"http", "https"} or not parts.hostname or "@" in parts.netloc:
            return (
                f"the endpoint of {self.uri} can't be used; "
                "write it like https://host:9000, without credentials"
            )
        return None


class PerProcess(Generic[T]):
    """Makes a thing for a location once in a process, and again when AWS's settings changed.

    A forked child never uses its parent's: a client would share its kept-alive sockets and
    silently return another process's bytes. Nor is it closed there, or collected: it might wait
    for a lock that nobody holds in the child.
    """

    def __init__(self, make: Callable[[S3Location], T]) -> None:
        self._make = make
        self._made: dict[tuple[int, S3Location], tuple[Settings, T]] = {}
        self._lock = threading.Lock()
        os.register_at_fork(after_in_child=self._renew_lock)

    def of(self, location: S3Location) -> T:
        """Return this process's; threads may share it."""
        key, settings = (os.getpid(), location), aws_settings()
        with self._lock:
            if key not in self._made or self._made[key][0] != settings:
                # The one before is dropped: tokens change each hour, a client takes megabytes.
                self._made[key] = settings, self._make(location)
            return self._made[key][1]

    def _renew_lock(self) -> None:
        # A fork may happen while another thread holds it, and the child would wait forever.
        self._lock = threading.Lock()


def aws_settings() -> Settings:
    """Return the variables that AWS's tools read, and what tells that their files have changed.

    In a notebook variables change. In the files, people and programs replace keys that expire;
    botocore reads them once.
    """
    names = sorted(name for name in os.environb if name.startswith(b"AWS_"))
    # Not by items(): that raises KeyError when another thread takes a variable away meanwhile.
    settings = [(name, os.environb.get(name, b"")) for name in names]
    for variable, usual in _FILES:
        path = Path(os.environ.get(variable) or usual)
        with suppress(OSError, RuntimeError):  # there is none, or no home
            found = path.expanduser().stat()
            state = f"{found.st_mtime_ns} {found.st_ino} {found.st_size}"
            settings.append((usual.encode(), state.encode()))
    return tuple(settings)


def session_of(location: S3Location) -> Any:
    """Make botocore's session, which finds credentials and settings."""
    from botocore.session import Session  # noqa: PLC0415 - half a second; many only name a storage

    session = Session(profile=location.profile)
    if location.access_key_id is not None:
        keys = location.access_key_id, location.secret_access_key, location.session_token
        session.set_credentials(*keys)
    session.register_component("data_loader", _loader_of(session.get_config_variable("data_path")))
    return session


@cache
def _loader_of(data_path: str | None) -> Any:
    """Return what reads botocore's descriptions of services: it keeps them, for forks too.

    Parsing S3's takes 0.12 s of processor time, and in a process forked from a large one 0.5 s:
    the garbage collection that it sets off copies the parent's objects.
    """
    from botocore.loaders import create_loader  # noqa: PLC0415 - as above

    return create_loader(data_path)


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
    try:
        client = session.create_client(
            "s3",
            endpoint_url=location.endpoint_url,
            region_name=location.region,
            verify=location.verify,
            config=config,
        )
    except ValueError as error:
        if not str(error).startswith("Invalid endpoint"):
            raise
        msg = (
            f"the endpoint of {location.uri} can't be used; write it like https://host:9000, in "
            "AWS_ENDPOINT_URL, AWS_ENDPOINT_URL_S3, ~/.aws/config or the block"
        )
        raise InvalidParamsError(msg) from None  # botocore's text has its password, if any
    client.meta.events.register("after-call.s3", _note_route)
    return client


def _checksums(location: S3Location, profile: Mapping[str, Any]) -> dict[str, str]:
    """Leave out the newer checksums, which stores other than AWS may not know.

    Lengths are compared all the same, and checkpoints have their own digests.
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
