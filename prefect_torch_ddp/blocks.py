"""Prefect blocks: each becomes a plain Storage, once, where the flow runs; ranks see no block."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from prefect.blocks.core import Block
from prefect.exceptions import ObjectNotFound
from prefect.utilities.importtools import from_qualified_name

from prefect_torch_ddp.data.images.listing import digest_of_listing
from prefect_torch_ddp.errors import BadKeyError, InvalidParamsError
from prefect_torch_ddp.storage.directory import DirectoryStorage
from prefect_torch_ddp.storage.locate import is_path, source_from_uri, storage_from_uri
from prefect_torch_ddp.storage.protocol import Readable, Storage
from prefect_torch_ddp.storage.s3.storage import S3Storage


def resolve_storage(reference: str) -> Storage:
    """Make the storage that a block, a path or a URI names.

    A block is its type's slug and its own name: `s3-bucket/nightly`,
    `remote-file-system/nightly` or `local-file-system/nightly`. The relative path that reads
    the same is written `./s3-bucket/nightly`.

    Raises:
        InvalidParamsError: there is no such block, or no storage can be made of it, or it has
            settings that aren't used; says what to do.
    """
    if not is_block(reference):
        return storage_from_uri(reference)
    kind, _, name = reference.partition("/")
    class_name, convert = _KINDS[kind]
    try:
        block_class = from_qualified_name(class_name)
    except ModuleNotFoundError as error:
        msg = (
            f"the block {reference} needs prefect-aws, which isn't installed here: "
            "pip install 'prefect-torch-ddp[aws]'"
        )
        raise InvalidParamsError(msg) from error
    block = _load(block_class, kind, name)
    try:
        return convert(block, reference)
    except BadKeyError as error:
        msg = f"the block {reference} has a folder that can't be used: {error}"
        raise InvalidParamsError(msg) from error


def absolute_reference(reference: str) -> str:
    """Return what names the same storage in any folder, and for any user, of this file system.

    Raises:
        InvalidParamsError: it names a folder that can't be one.
    """
    if is_block(reference) or not is_path(reference):
        return reference
    return storage_from_uri(reference).uri


def check_reference(reference: str) -> None:
    """Refuse what names no storage, as far as is known without looking there or asking Prefect.

    Raises:
        InvalidParamsError: it is nearly a block, or a URI of no known storage.
    """
    if not is_block(reference):
        storage_from_uri(reference)


def is_block(reference: str) -> bool:
    """Tell a block from a path or a URI; refuse what is nearly one. Prefect isn't asked."""
    kind, slash, name = reference.partition("/")
    if not slash or kind.lower() not in {*_KINDS, *_OTHER_KINDS}:
        return False
    if kind in _KINDS and name and "/" not in name:
        return True
    # Or what was meant for a bucket would be written to a folder of that name here.
    msg = (
        f"{reference} names no block that can be a storage: write one as <kind>/<name> with the "
        f"kind {', '.join(_KINDS)}, and nothing after its name (a folder in the bucket is a "
        f"setting of the block); a folder here as ./{reference}"
    )
    raise InvalidParamsError(msg)


def _load(block_class: type[Block], slug: str, name: str) -> Block:
    load: Any = block_class.load
    try:
        block: Block = load(name, _sync=True)  # else a coroutine, in an async flow
    except ValueError as error:
        if not isinstance(error.__cause__, ObjectNotFound):
            raise
        msg = (
            f"there is no block {slug}/{name} on this Prefect server; register it in the UI under "
            f"Blocks, or by {block_class.__name__}(...).save({name!r}); `prefect block ls` shows "
            "those there are"
        )
        raise InvalidParamsError(msg) from error
    return block


def _from_s3_bucket(block: Any, reference: str) -> S3Storage:
    credentials = block.credentials
    parameters = credentials.aws_client_parameters
    config: Mapping[str, Any] = parameters.config or {}
    _refuse_config(reference, "config", config)
    if not parameters.use_ssl:
        _refuse_no_tls(reference, parameters.endpoint_url)
    anonymous = config.get("signature_version") == "unsigned"
    verify = parameters.verify_cert_path or parameters.verify
    return S3Storage(
        block.bucket_name,
        block.bucket_folder,
        endpoint_url=parameters.endpoint_url,
        region=credentials.region_name or config.get("region_name"),
        anonymous=anonymous,
        verify=verify if verify is None or isinstance(verify, bool) else str(verify),
        **({} if anonymous else _keys(credentials, reference)),
        **_addressing(config),
    )


def _refuse_config(reference: str, name: str, config: Mapping[str, Any]) -> None:
    _refuse_unused(reference, f"{name}.", config, _CONFIG)
    _refuse_unused(reference, f"{name}.s3.", config.get("s3") or {}, _S3)


def _refuse_no_tls(reference: str, endpoint_url: str | None) -> None:
    if endpoint_url is None:
        asks = f"the block {reference} asks for no TLS and names no endpoint"
        msg = f"{asks}; give its endpoint_url as http://..."
        raise InvalidParamsError(msg)


def _addressing(config: Mapping[str, Any]) -> dict[str, Any]:
    style = config.get("s3", {}).get("addressing_style")
    return {"addressing_style": style} if style else {}


def _keys(credentials: Any, reference: str) -> dict[str, Any]:
    if hasattr(credentials, "minio_root_user"):
        return {
            "access_key_id": credentials.minio_root_user,
            "secret_access_key": credentials.minio_root_password.get_secret_value(),
        }
    if credentials.assume_role_arn:
        msg = (
            f"the block {reference} assumes a role, whose credentials would expire during a long "
            "training; put the role into a profile of ~/.aws/config on the Dask workers and name "
            "it as the block's profile_name"
        )
        raise InvalidParamsError(msg)
    secret = credentials.aws_secret_access_key
    return {
        "access_key_id": credentials.aws_access_key_id,
        "secret_access_key": secret.get_secret_value() if secret else None,
        "session_token": credentials.aws_session_token,
        "profile": credentials.profile_name,
    }


def _from_remote_file_system(block: Any, reference: str) -> S3Storage:
    scheme, _, rest = block.basepath.partition("://")
    if scheme not in {"s3", "s3a"}:
        msg = (
            f"the block {reference} is of the kind {scheme}://, and only s3:// can be written "
            "conditionally here; use an S3 bucket, or mount the storage and give its directory"
        )
        raise InvalidParamsError(msg)
    settings = block.settings
    client: Mapping[str, Any] = settings.get("client_kwargs") or {}
    config: Mapping[str, Any] = settings.get("config_kwargs") or {}
    _refuse_unused(reference, "", settings, _SETTINGS)
    _refuse_unused(reference, "client_kwargs.", client, _CLIENT)
    _refuse_config(reference, "config_kwargs", config)
    endpoint_url = settings.get("endpoint_url") or client.get("endpoint_url")
    if not (settings.get("use_ssl", True) and client.get("use_ssl", True)):
        _refuse_no_tls(reference, endpoint_url)
    return S3Storage.from_uri(
        f"s3://{rest}",
        endpoint_url=endpoint_url,
        region=client.get("region_name"),
        profile=settings.get("profile"),
        access_key_id=settings.get("key") or client.get("aws_access_key_id"),
        secret_access_key=settings.get("secret") or client.get("aws_secret_access_key"),
        session_token=settings.get("token") or client.get("aws_session_token"),
        anonymous=bool(settings.get("anon", False)),
        verify=client.get("verify"),
        **_addressing(config),
    )


def _from_local_file_system(block: Any, reference: str) -> DirectoryStorage:
    if not block.basepath:
        has = f"the block {reference} has no basepath, so each process would write elsewhere"
        msg = f"{has}; give it an absolute path"
        raise InvalidParamsError(msg)
    return DirectoryStorage(Path(block.basepath))


def _refuse_unused(
    reference: str, name: str, given: Mapping[str, Any], used: frozenset[str]
) -> None:
    """Refuse settings that a block has and that would be dropped, such as one that encrypts."""
    unused = [f"{name}{key}" for key, value in given.items() if value and key not in used]
    if unused:
        msg = (
            f"the block {reference} sets {', '.join(unused)}, which isn't used here: remove it "
            "from the block (for encryption, give the bucket a default; for a proxy, set "
            "HTTPS_PROXY where flow and workers run)"
        )
        raise InvalidParamsError(msg)


_TRANSFER = frozenset(
    {
        "connect_timeout",
        "max_pool_connections",
        "parameter_validation",
        "read_timeout",
        "retries",
        "tcp_keepalive",
        "user_agent",
        "user_agent_extra",
    }
)
"""Settings of botocore about how, not what, is transferred; ours take their place."""
_CONFIG = _TRANSFER | {"region_name", "s3", "signature_version"}
_S3 = frozenset({"addressing_style"})
_CLIENT = frozenset(
    {
        *("aws_access_key_id", "aws_secret_access_key", "aws_session_token"),
        *("endpoint_url", "region_name", "use_ssl", "verify"),
    }
)
_SETTINGS = frozenset(
    {
        *("anon", "client_kwargs", "config_kwargs", "endpoint_url", "key", "profile", "secret"),
        *("token", "use_ssl"),
        # Of fsspec and s3fs: how files are read, and what is remembered.
        *("asynchronous", "cache_regions", "default_block_size", "default_cache_type"),
        *("default_fill_cache", "fixed_upload_size", "listings_expiry_time", "max_concurrency"),
        *("max_paths", "skip_instance_cache", "use_listings_cache"),
    }
)
# By name, since prefect_aws takes seconds to import.
_KINDS: Mapping[str, tuple[str, Callable[[Any, str], Storage]]] = {
    "s3-bucket": ("prefect_aws.S3Bucket", _from_s3_bucket),
    "remote-file-system": ("prefect.filesystems.RemoteFileSystem", _from_remote_file_system),
    "local-file-system": ("prefect.filesystems.LocalFileSystem", _from_local_file_system),
}

_OTHER_KINDS = frozenset({"gcs-bucket", "azure-blob-storage-container"})
"""Other blocks of Prefect that people have; they can't be written conditionally here."""


def resolve_source(reference: str) -> Readable:
    """Return what raw data is read from.

    Args:
        reference: a directory, an `s3://` URI, a block, or the `https://` address of one file.

    Raises:
        InvalidParamsError: it names nothing that can be read.
    """
    found: Readable
    found = resolve_storage(reference) if is_block(reference) else source_from_uri(reference)
    folder = found.local_folder
    if folder is not None and not folder.is_dir():
        sees = "the flow and the ranks have to see the same one"
        msg = f"source is {reference}, and there is no folder {folder} here; {sees}"
        raise InvalidParamsError(msg)
    return found


def fingerprint_of(source: Readable) -> Mapping[str, str]:
    """List the raw data, and return what changes when any object of it does, or its place.

    Takes some seconds for 20,000 objects of a bucket.

    Raises:
        InvalidParamsError: there is nothing.
        StorageError: it can't be listed.
    """
    if next(source.list_objects(""), None) is None:
        hint = "give the place of the raw data, or leave source out"
        msg = f"source is {source.uri}, but nothing is there; {hint}"
        raise InvalidParamsError(msg)
    return {"uri": source.uri, "listing": digest_of_listing(source)}
