"""Owns where the objects of a bucket are asked for, as botocore would: address, region,
certificates, proxy, credentials.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from prefect_torch_ddp.storage.s3.client import MadeOnce

if TYPE_CHECKING:
    from prefect_torch_ddp.storage.s3.storage import S3Storage


_SAFE = (
    "/~-._"  # as botocore's signer leaves them: what is signed and what is sent have to be the same
)
_PROBE = "k"


@dataclass(frozen=True)
class Target:
    """An address without any secret; plain values, so it may cross a fork."""

    url: str
    """Of the bucket, ends with a slash."""
    region: str
    """That requests are signed for."""
    ca_bundle: str | None
    """Path of the certificates to trust; None: certificates aren't checked, or there is no
    TLS."""

    def url_of(self, name: str) -> str:
        """Return the URL of an object."""
        return self.url + quote(name, safe=_SAFE)


class _SeenError(Exception):
    """Carries the URL of a request that isn't sent."""


def _resolve(storage: "S3Storage") -> Target:
    from botocore.httpsession import get_cert_path  # noqa: PLC0415 - botocore loads when an object is touched

    from prefect_torch_ddp.storage.s3.client import connect  # noqa: PLC0415

    def show(request: Any, **_: Any) -> None:
        raise _SeenError(request.url)

    client = connect(storage, signs=False)
    client.meta.events.register("before-send.s3.GetObject", show)
    try:
        client.get_object(Bucket=storage.bucket, Key=_PROBE)
    except _SeenError as seen:
        url = str(seen).partition("?")[0].removesuffix(_PROBE)
    verify = storage.verify
    if verify is None:
        verify = _session(storage).get_config_variable("ca_bundle") or True
    region = client.meta.region_name
    client.close()
    bundle = get_cert_path(verify) if url.startswith("https:") else None
    return Target(url, "us-east-1" if region in {None, "aws-global"} else region, bundle or None)


def credentials_of(storage: "S3Storage") -> Any:
    """Return botocore's credentials, which renew themselves where they can; None where requests
    aren't signed.

    Raises:
        BotoCoreError: there are none.
    """
    from botocore.credentials import Credentials  # noqa: PLC0415
    from botocore.exceptions import NoCredentialsError  # noqa: PLC0415

    if storage.anonymous:
        return None
    if storage.access_key_id is not None:
        return Credentials(storage.access_key_id, storage.secret_access_key, storage.session_token)
    found = _session(storage).get_credentials()
    if found is None:
        raise NoCredentialsError
    return found


def _session(storage: "S3Storage") -> Any:
    from botocore.session import Session  # noqa: PLC0415

    return Session(profile=storage.profile)


target_of = MadeOnce(_resolve, crosses_forks=True).of
"""Return the address of a storage's bucket, asked of botocore once: endpoint rules, profiles
and variables are its business."""
