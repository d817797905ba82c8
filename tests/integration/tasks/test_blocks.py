"""A block on a real Prefect server becomes a storage that works on a real S3 server."""

import asyncio
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from prefect.client.orchestration import get_client

from prefect_torch_ddp.blocks import absolute_reference, resolve_storage
from prefect_torch_ddp.errors import InvalidParamsError, StorageError
from prefect_torch_ddp.storage.directory import DirectoryStorage
from prefect_torch_ddp.storage.s3.storage import S3Storage
from tests.support.blocks import save_block
from tests.support.s3_server import S3Server

pytestmark = pytest.mark.usefixtures("prefect_api")

SECRET = "hunter2-is-the-secret"
ROOT = Path(__file__).parents[3]


def save_minio(name: str, server: S3Server, folder: str) -> str:
    """Save a bucket with the other kind of credentials that it takes."""
    from prefect_aws import AwsClientParameters, MinIOCredentials, S3Bucket

    user, password = server.keys["owner"]
    credentials = MinIOCredentials(
        minio_root_user=user,
        minio_root_password=password,
        aws_client_parameters=AwsClientParameters(endpoint_url=server.endpoint_url),
    )
    S3Bucket(bucket_name="bucket", bucket_folder=folder, credentials=credentials).save(name)
    return f"s3-bucket/{name}"


def save_remote(name: str, server: S3Server, folder: str, *, for_client: bool = False) -> str:
    """Save one on s3fs: it has the names of fsspec, in its settings or for its client."""
    from prefect.filesystems import RemoteFileSystem

    key, secret = server.keys["owner"]
    settings: dict[str, Any] = {"key": key, "secret": secret, "endpoint_url": server.endpoint_url}
    if for_client:
        named = {"aws_access_key_id": key, "aws_secret_access_key": secret}
        where = {"endpoint_url": server.endpoint_url, "region_name": "us-east-1"}
        settings = {"client_kwargs": where | named}
    RemoteFileSystem(basepath=f"s3://bucket/{folder}/", settings=settings).save(name)
    return f"remote-file-system/{name}"


def check_every_reference(server: S3Server, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Expect AwsCredentials, MinIOCredentials, s3fs and the AWS chain to reach the same objects,
    and the block's own client to find what the storage wrote."""
    from prefect_aws import S3Bucket

    _, secret = server.keys["owner"]
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    references = (
        save_block(f"{kind}-aws", server, folder="/kinds/"),
        save_minio(f"{kind}-minio", server, "kinds"),
        save_remote(kind, server, "kinds"),
        save_remote(f"{kind}-client", server, "kinds", for_client=True),
        "s3://bucket/kinds",
    )
    storages = [resolve_storage(reference) for reference in references]
    for number, storage in enumerate(storages):
        storage.check_writable()
        storage.write(f"object/{number}", b"1")
        assert storage.write_if_absent("claim", b"1") is (number == 0)
    keys = ["claim", *(f"object/{number}" for number in range(len(storages)))]
    for storage in storages:
        assert [found.key for found in storage.list()] == keys
        assert storage.uri == "s3://bucket/kinds"
        assert secret not in repr(storage)
        assert pickle.loads(pickle.dumps(storage)).read("claim") == b"1"
    client = S3Bucket.load(f"{kind}-aws").credentials.get_client("s3")
    assert client.get_object(Bucket="bucket", Key="kinds/claim")["Body"].read() == b"1"


def test_every_kind_of_reference_works(
    s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each reference to a block opens the S3 server of the tests."""
    check_every_reference(s3_server, "s3", monkeypatch)


@pytest.mark.extended
def test_client_parameters_are_honoured(s3_server: S3Server, tmp_path: Path) -> None:
    """The storage keeps certificates, addressing and anonymous use, and only the name of a
    profile."""
    from prefect_aws import AwsClientParameters

    bundle = tmp_path / "ca.pem"
    bundle.write_text("")
    config = {"s3": {"addressing_style": "virtual"}}
    # prefect-aws drops the path of a block that is loaded again, unless verify is on too.
    parameters = AwsClientParameters(
        endpoint_url="https://s3.internal:9000", verify=True, verify_cert_path=bundle, config=config
    )
    token = {"aws_session_token": "token", "aws_client_parameters": parameters}
    storage = resolve_storage(save_block("parameters", s3_server, **token))
    assert isinstance(storage, S3Storage)
    expected = (str(bundle), "virtual", "token")
    assert (storage.verify, storage.addressing_style, storage.session_token) == expected
    endpoint = {"endpoint_url": s3_server.endpoint_url}
    unsigned = AwsClientParameters(
        **endpoint, verify=False, config={"signature_version": "unsigned"}
    )
    unsigned_block = save_block(
        "unsigned", s3_server, folder="folder", aws_client_parameters=unsigned
    )
    assert resolve_storage(unsigned_block) == S3Storage(
        "bucket", "folder", **endpoint, region="us-east-1", anonymous=True, verify=False
    )
    no_keys = {"aws_access_key_id": None, "aws_secret_access_key": None}
    named = resolve_storage(save_block("profile", s3_server, profile_name="training", **no_keys))
    assert (named.profile, named.access_key_id, named.secret_access_key) == ("training", None, None)


@pytest.mark.extended
def test_blocks_that_cannot_work_say_so(s3_server: S3Server) -> None:
    """Errors for unusable blocks name the reason and show no secret."""
    from prefect.filesystems import LocalFileSystem, RemoteFileSystem
    from prefect_aws import AwsClientParameters

    half = {"aws_access_key_id": None, "aws_secret_access_key": SECRET}
    no_tls = {"aws_client_parameters": AwsClientParameters(use_ssl=False)}
    RemoteFileSystem(basepath="gcs://bucket/folder", settings={"token": SECRET}).save("google")
    LocalFileSystem().save("nowhere")
    for reference, says in (
        (
            save_block("role", s3_server, assume_role_arn="arn:aws:iam::123456789012:role/x"),
            r"s3-bucket/role assumes a role.*profile",
        ),
        (save_block("no-tls", s3_server, **no_tls), "s3-bucket/no-tls asks for no TLS"),
        (
            save_block("outside", s3_server, folder="a/../../b"),
            "s3-bucket/outside has a folder that can't be used",
        ),
        (save_block("half", s3_server, **half), "give both"),
        (
            "remote-file-system/google",
            "remote-file-system/google is of the kind gcs://.*use an S3 bucket",
        ),
        ("local-file-system/nowhere", "no basepath"),
    ):
        with pytest.raises(InvalidParamsError, match=says) as caught:
            resolve_storage(reference)
        assert SECRET not in str(caught.value)


def test_a_local_file_system_is_a_directory(tmp_path: Path) -> None:
    """The block's basepath is the root, also in an async flow."""
    from prefect.filesystems import LocalFileSystem

    LocalFileSystem(basepath=str(tmp_path)).save("here")

    async def resolve() -> Any:
        return resolve_storage("local-file-system/here")

    assert resolve_storage("local-file-system/here") == DirectoryStorage(tmp_path)
    assert asyncio.run(resolve()) == DirectoryStorage(tmp_path)


@pytest.mark.parametrize("slug", ["s3-bucket", "remote-file-system", "local-file-system"])
@pytest.mark.parametrize("name", ["no-such-block", "No such block"])
def test_an_unknown_block_is_named_with_the_way_to_register_it(slug: str, name: str) -> None:
    """An unknown block never becomes a folder of that name."""
    with pytest.raises(InvalidParamsError, match=f"there is no block {slug}/{name} .*register it"):
        resolve_storage(f"{slug}/{name}")


def test_everything_else_is_a_path_or_a_uri(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the three slugs followed by one name are blocks."""
    monkeypatch.chdir(tmp_path)
    paths = ("./s3-bucket/name", "./s3-bucket/a/b", "s3-bucket")
    for path in (*paths, "other/name", "/s3-bucket/name"):
        assert resolve_storage(path) == DirectoryStorage(Path(path))
    assert resolve_storage("s3://bucket/p") == S3Storage("bucket", "p")


@pytest.mark.parametrize(
    "reference",
    ["s3-bucket/a/b", "s3-bucket/name/", "s3-bucket/", "S3-bucket/name", "gcs-bucket/name"],
)
def test_what_is_nearly_a_block_is_no_folder(reference: str) -> None:
    """Checkpoints that were meant for a bucket aren't written to a local folder of its name."""
    for read in (resolve_storage, absolute_reference):
        with pytest.raises(
            InvalidParamsError, match=rf"{reference} names no block .* \./{reference}"
        ):
            read(reference)


@pytest.mark.extended
def test_a_setting_that_would_be_dropped_is_refused(s3_server: S3Server) -> None:
    """An object isn't stored without the encryption that the block asks for."""
    from prefect.filesystems import RemoteFileSystem
    from prefect_aws import AwsClientParameters

    for number, (settings, names) in enumerate(
        [
            ({"s3_additional_kwargs": {"ServerSideEncryption": "aws:kms"}}, "s3_additional_kwargs"),
            ({"requester_pays": True}, "requester_pays"),
            ({"client_kwargs": {"api_version": "2006-03-01"}}, "client_kwargs.api_version"),
            ({"config_kwargs": {"proxies": {"https": "proxy:1"}}}, "config_kwargs.proxies"),
            ({"default_block_size": 5_000_000, "requester_pays": False, "use_ssl": True}, ""),
        ]
    ):
        RemoteFileSystem(basepath="s3://bucket/f", settings=settings).save(f"settings-{number}")
        reference = f"remote-file-system/settings-{number}"
        if not names:
            assert isinstance(resolve_storage(reference), S3Storage)
            continue
        with pytest.raises(InvalidParamsError, match=f"{reference} sets {names}, which isn't used"):
            resolve_storage(reference)
    config = {"s3": {"use_accelerate_endpoint": True}, "retries": {"mode": "standard"}}
    reference = save_block(
        "accelerated", s3_server, aws_client_parameters=AwsClientParameters(config=config)
    )
    with pytest.raises(
        InvalidParamsError, match=r"sets config\.s3\.use_accelerate_endpoint, which"
    ):
        resolve_storage(reference)


# ---- deployments/register_blocks.py


def register(**variables: str) -> "subprocess.CompletedProcess[str]":
    """Call it as people do."""
    kept = {name: value for name, value in os.environ.items() if name[:3] not in ("AWS", "S3_")}
    command = [sys.executable, str(ROOT / "deployments" / "register_blocks.py")]
    return subprocess.run(
        command, check=False, capture_output=True, text=True, env=kept | variables, timeout=120
    )


def blocks() -> dict[str, Any]:
    """Return every block that is on the server: its id by its name, also of those without a
    name."""
    with get_client(sync_client=True) as client:
        found = client.read_block_documents(include_secrets=False)
    return {f"{block.block_type_name}/{block.name or block.id}": block.id for block in found}


@pytest.mark.long
def test_registered_again_a_block_is_changed(s3_server: S3Server) -> None:
    """A second registration updates the same blocks, with new keys and a new folder."""
    _, secret = s3_server.keys["owner"]
    place = {"S3_BUCKET": s3_server.bucket, "S3_BLOCK_NAME": "registered"}
    place |= s3_server.environment()
    wrong = {"AWS_SECRET_ACCESS_KEY": "wrong"}
    first = register(**place | wrong, S3_FOLDER="one")
    assert first.returncode == 0, first.stderr
    assert 'params={"storage": "s3-bucket/registered"}' in first.stdout
    there = blocks()
    assert {"S3 Bucket/registered", "AWS Credentials/registered-credentials"} <= there.keys()
    with pytest.raises(StorageError, match="the secret is wrong"):
        resolve_storage("s3-bucket/registered").check_writable()
    for folder in ("two", "two"):
        again = register(**place, S3_FOLDER=folder)
        assert again.returncode == 0, again.stderr
        assert secret not in again.stdout + again.stderr
        assert blocks() == there
        storage = resolve_storage("s3-bucket/registered")
        assert storage.uri == f"s3://{s3_server.bucket}/{folder}"
        storage.check_writable()


@pytest.mark.long
@pytest.mark.parametrize(
    ("variables", "missing"),
    [
        ({}, "S3_BUCKET"),
        ({"S3_BUCKET": "b", "AWS_SECRET_ACCESS_KEY": SECRET}, "AWS_ACCESS_KEY_ID"),
    ],
)
def test_what_is_missing_is_named_and_nothing_is_registered(
    variables: dict[str, str], missing: str
) -> None:
    """The message names the missing variable and shows no secret."""
    there = blocks()
    done = register(**variables)
    assert done.returncode != 0
    assert missing in done.stderr
    assert SECRET not in done.stdout + done.stderr
    assert blocks() == there
