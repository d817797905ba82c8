"""The errors of failed S3 requests: what each one means and what to do, without any secret."""

from http import HTTPStatus
from typing import TYPE_CHECKING

from prefect_torch_ddp.errors import (
    BadAnswerError,
    DamagedObjectError,
    ObjectChangedError,
    ObjectNotFoundError,
    OtherObjectError,
    StorageError,
)

if TYPE_CHECKING:
    from botocore.exceptions import ClientError

CHANGED = (
    "the object changed since it was listed: list it again, by running prepare again, "
    "or keep data in use unchanged"
)

_KEYS = (
    "check the access key, the secret and the session token in the block, "
    "or in the worker's environment"
)
_REGION = "give the bucket's region, in the block or as AWS_DEFAULT_REGION"
_REACH = "check the endpoint URL, the network, and that the server is up"
_TORN = f"the content broke off: {_REACH}"
_BUSY = "the store is overloaded or down: try again later, or with fewer ranks"
_FULL = "the store is full: free space there, or ask for a higher quota"
_DENIED = (
    "access denied: the credentials need the rights GetObject, PutObject, DeleteObject and "
    "AbortMultipartUpload on the objects, and ListBucket and ListBucketMultipartUploads on the "
    "bucket"
)

_BY_CODE = {
    "NoSuchBucket": "there is no such bucket: create it, or correct its name",
    "AccessDenied": _DENIED,
    "Forbidden": _DENIED,
    "InvalidAccessKeyId": f"the store doesn't know this access key: {_KEYS}",
    "SignatureDoesNotMatch": f"the secret is wrong: {_KEYS}",
    "InvalidToken": f"the session token is wrong: {_KEYS}",
    "ExpiredToken": "the session token has expired: register a fresh one, or a role that renews it",
    "RequestTimeTooSkewed": (
        "this machine's clock differs too much from the store's: set it, for instance by NTP"
    ),
    "AuthorizationHeaderMalformed": f"the request was signed for another region: {_REGION}",
    "PermanentRedirect": f"the bucket is in another region: {_REGION}",
    "SlowDown": _BUSY,
    "NotImplemented": "the store can't do that: use one that honours conditional writes",
    "QuotaExceeded": _FULL,
}

_BY_STATUS = {401: f"access denied: {_KEYS}", 403: _DENIED, 429: _BUSY, 507: _FULL}

_BY_CLASS = {
    "NoCredentialsError": (
        "there are no credentials: register an s3-bucket block with some, or set "
        "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY where the Dask workers run"
    ),
    "CredentialRetrievalError": f"the credentials can't be fetched: {_KEYS}",
    "ProfileNotFound": (
        "this machine has no such AWS profile: add it to ~/.aws, or use a block with credentials"
    ),
    "EndpointConnectionError": f"the endpoint can't be reached: {_REACH}",
    "ConnectTimeoutError": f"the endpoint doesn't answer: {_REACH}",
    "ConnectionClosedError": (
        f"the endpoint closed the connection, each time: {_REACH}; if it has TLS, write https://"
    ),
    "ReadTimeoutError": (
        f"the endpoint didn't answer in time: {_REACH}; "
        "some stores are silent, too, when they are full"
    ),
    "ProxyConnectionError": "the proxy can't be reached: check HTTP_PROXY and HTTPS_PROXY",
    "ResponseStreamingError": _TORN,
    "IncompleteReadError": _TORN,
    "HTTPError": _TORN,
    "ResponseParserError": (
        "the answer isn't S3's: check the endpoint URL (https:// where it has TLS), "
        "and what stands between"
    ),
    "HTTPClientError": (
        "the request couldn't be sent: look for spaces and line breaks in the endpoint URL and "
        "the credentials"
    ),
    "SSLError": (
        "the endpoint's certificate isn't trusted: name its CA bundle (in a block "
        "verify_cert_path, with verify on; else AWS_CA_BUNDLE), or write http:// if it has no TLS"
    ),
}


def explained(verb: str, where: str, error: Exception, tries: str) -> Exception:
    """Make the StorageError that says what is wrong and what to do.

    Args:
        verb: what was tried, for instance "read".
        where: bucket, key and endpoint: "s3://bucket/key at http://host:9000".
        error: botocore's or urllib3's, or a BadAnswerError; another one is returned as it is.
        tries: "; tried 3 times in 2 s", or nothing.
    """
    from botocore.exceptions import BotoCoreError, ClientError  # noqa: PLC0415 - loaded by now
    from botocore.parsers import ResponseParserError  # noqa: PLC0415
    from urllib3.exceptions import HTTPError  # noqa: PLC0415

    if isinstance(error, ClientError):
        return _refused(verb, where, error, tries)
    if isinstance(error, OtherObjectError):
        return ObjectChangedError(f"can't {verb} {where}: {error}")
    if isinstance(error, BadAnswerError):
        way_out = "look for what changes it on its way (a proxy), or for a disk that fails there"
        return DamagedObjectError(f"can't {verb} {where}: {error}{tries}; {way_out}")
    if isinstance(error, BotoCoreError | ResponseParserError | HTTPError | OSError):
        known = (_BY_CLASS.get(base.__name__) for base in type(error).__mro__)
        way_out = next(filter(None, known), str(error))
        return StorageError(f"can't {verb} {where}: {way_out} ({type(error).__name__}{tries})")
    return error


def _refused(verb: str, where: str, error: "ClientError", tries: str) -> StorageError:
    answer = error.response.get("Error", {})
    code = str(answer.get("Code", "")) or "no code"
    status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    if code == "NoSuchKey":
        return ObjectNotFoundError(f"can't {verb} {where}: there is no such object")
    if status == HTTPStatus.PRECONDITION_FAILED and verb == "read":
        return ObjectChangedError(f"can't {verb} {where}: {CHANGED}")
    is_servers = status >= HTTPStatus.INTERNAL_SERVER_ERROR
    unknown = _BUSY if is_servers else "look the code up in the store's manual"
    way_out = _BY_CODE.get(code) or _BY_STATUS.get(status, unknown)
    if way_out.endswith(_REGION) and (region := answer.get("Region")):
        way_out += f": {region}"
    return StorageError(f"can't {verb} {where}: {way_out} ({code}, status {status}{tries})")
