"""The location of an S3 storage: bucket, prefix and how to get there."""

import os
from dataclasses import KW_ONLY, dataclass, field
from typing import Literal
from urllib.parse import urlsplit

from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.storage.protocol import check_key


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
                "write it like https://host:9000, credentials apart"
            )
        return None
