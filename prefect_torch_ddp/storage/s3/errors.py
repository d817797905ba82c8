"""Owns what a failed S3 request is called and what to do about it, in words that hold no
secret.
"""

from http import HTTPStatus
from typing import TYPE_CHECKING

from prefect_torch_ddp.errors import DamagedObjectError, ObjectNotFoundError, StorageError
from prefect_torch_ddp.storage.s3.retries import ONCE, DamagedError, Tries

if TYPE_CHECKING:
    from botocore.exceptions import ClientError


_CREDENTIALS = "check the access key, the secret and the session token in the block, or in the worker's environment"
_REGION = "give the bucket's region, in the block or as AWS_REGION"
_REACH = "check the endpoint URL, the network, and that the server is up"
_TORN = f"the content broke off: {_REACH}"
_BUSY = "the store is overloaded or down: try again later, or with fewer ranks"
_RIGHTS = (
    "the credentials need the rights GetObject, PutObject, DeleteObject and AbortMultipartUpload on the objects, and ListBucket "
    "and ListBucketMultipartUploads on the bucket"
)

_BY_CODE = {
    "NoSuchBucket": "there is no such bucket: create it, or correct its name",
    "InvalidBucketName": "no bucket may be called so: correct its name",
    "AccessDenied": f"access denied: {_RIGHTS}",
    "Forbidden": f"access denied: {_RIGHTS}",
    "AllAccessDisabled": f"access denied: {_RIGHTS}",
    "AccountProblem": "the account has a problem: ask its owner",
    "InvalidAccessKeyId": f"the store doesn't know this access key: {_CREDENTIALS}",
    "InvalidClientTokenId": f"the store doesn't know this access key: {_CREDENTIALS}",
    "SignatureDoesNotMatch": f"the secret is wrong: {_CREDENTIALS}",
    "InvalidToken": f"the session token is wrong: {_CREDENTIALS}",
    "ExpiredToken": "the session token has expired: register fresh credentials, or use a role that renews them",
    "TokenRefreshRequired": "the session token has expired: register fresh credentials, or use a role that renews them",
    "RequestTimeTooSkewed": "this machine's clock differs too much from the store's: set it, for instance by NTP",
    "AuthorizationHeaderMalformed": f"the request was signed for another region: {_REGION}",
    "PermanentRedirect": f"the bucket is in another region: {_REGION}",
    "IllegalLocationConstraintException": f"the bucket is in another region: {_REGION}",
    "SlowDown": _BUSY,
    "ServiceUnavailable": _BUSY,
    "RequestTimeout": "the request reached the store too slowly: check the network, or have fewer ranks write at once",
    "InternalError": _BUSY,
    "BadDigest": "the store got something else than was sent: check the network, and what stands between",
    "XAmzContentSHA256Mismatch": "the store got something else than was sent: check the network, and what stands between",
    "InvalidPart": "the store doesn't know a part that it had taken: check the store, and what stands between",
    "NoSuchUpload": "somebody aborted the upload meanwhile: look whether another run is at this key",
    "NotImplemented": "the store can't do this kind of request: use one that honours conditional writes, such as AWS S3 or Ceph",
    "QuotaExceeded": "the quota is used up: free space, or ask for more",
    "XMinioStorageFull": "the store is full: free space there",
}

_BY_STATUS = {
    401: f"access denied: {_CREDENTIALS}",
    403: f"access denied: {_RIGHTS}",
    429: _BUSY,
    507: "the store is full: free space there",
}

_BY_CLASS = {
    "NoCredentialsError": "there are no credentials: register an s3-bucket block with some, or set AWS_ACCESS_KEY_ID and "
    "AWS_SECRET_ACCESS_KEY where the Dask workers run",
    "PartialCredentialsError": f"the credentials are incomplete: {_CREDENTIALS}",
    "CredentialRetrievalError": f"the credentials can't be fetched: {_CREDENTIALS}",
    "ProfileNotFound": "this machine has no such AWS profile: add it to ~/.aws, or use an s3-bucket block with credentials",
    "EndpointConnectionError": f"the endpoint can't be reached: {_REACH}",
    "ConnectTimeoutError": f"the endpoint doesn't answer: {_REACH}",
    "ConnectionClosedError": f"the endpoint closed the connection, each time: {_REACH}; if it has TLS, write https://",
    "ReadTimeoutError": f"the endpoint didn't answer in time: {_REACH}; some stores are silent, too, when they are full",
    "ProxyConnectionError": "the proxy can't be reached: check HTTP_PROXY and HTTPS_PROXY",
    "ResponseStreamingError": _TORN,
    "IncompleteReadError": _TORN,
    "HTTPError": _TORN,
    "ResponseParserError": "the answer isn't S3's: check the endpoint URL (https:// where it has TLS), and what stands between",
    "HTTPClientError": "the request couldn't be sent: look for spaces and line breaks in the endpoint URL and the credentials",
    "SSLError": "the endpoint's certificate isn't trusted: name its CA bundle (in a block verify_cert_path, with verify on; else "
    "AWS_CA_BUNDLE), or write http:// if it has no TLS",
}


def explained(verb: str, where: str, error: Exception, tries: Tries) -> Exception:
    """Make the StorageError that says what is wrong and what to do; an error of another kind is
    left as it is.

    Args:
        verb: what was tried, for instance "read".
        where: bucket, key and endpoint: "s3://bucket/key at http://host:9000".
        error: botocore's or urllib3's, or what we found ourselves.
        tries: how often.
    """
    from botocore.exceptions import BotoCoreError, ClientError  # noqa: PLC0415 - boto3 loads when an object is touched
    from botocore.parsers import ResponseParserError  # noqa: PLC0415
    from urllib3.exceptions import HTTPError  # noqa: PLC0415

    if isinstance(error, ClientError):
        return refused(verb, where, error, tries)
    if isinstance(error, BotoCoreError | ResponseParserError | HTTPError | OSError):
        return unanswered(verb, where, error, tries)
    if isinstance(error, DamagedError):
        way_out = (
            "look for what changes it on its way (a proxy), or for a disk that fails in the store"
        )
        return DamagedObjectError(f"can't {verb} {where}: {error}{tries}; {way_out}")
    return error


def refused(verb: str, where: str, error: "ClientError", tries: Tries = ONCE) -> StorageError:
    """Name what the store answered."""
    answer = error.response.get("Error", {})
    code = str(answer.get("Code", "")) or "no code"
    status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    if code == "NoSuchKey":
        return ObjectNotFoundError(f"can't {verb} {where}: there is no such object")
    by_status = _BY_STATUS.get(
        status,
        _BUSY
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR
        else "look the code up in the store's manual",
    )
    way_out = _BY_CODE.get(code, by_status)
    if way_out.endswith(_REGION) and (region := answer.get("Region")):
        way_out += f": {region}"
    return StorageError(f"can't {verb} {where}: {way_out} ({code}, status {status}{tries})")


def unanswered(verb: str, where: str, error: Exception, tries: Tries = ONCE) -> StorageError:
    """Name why no usable answer came."""
    way_out = next(
        (_BY_CLASS[base.__name__] for base in type(error).__mro__ if base.__name__ in _BY_CLASS),
        str(error),
    )
    return StorageError(f"can't {verb} {where}: {way_out} ({type(error).__name__}{tries})")
