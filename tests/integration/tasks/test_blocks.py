"""How a block saved on a real Prefect server becomes a storage that works against a real S3
server."""

import asyncio
import pickle
from pathlib import Path

import pytest

from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.storage.directory import DirectoryStorage
from prefect_torch_ddp.storage.s3.storage import S3Storage
from prefect_torch_ddp.tasks.blocks import resolve_storage

SECRET = "hunter2-is-the-secret"


@pytest.fixture(autouse=True)
def _server(prefect_api):
    """Have a real server hold the blocks."""


def _save_s3_bucket(name, server, folder="folder", **credentials):
    from prefect_aws import AwsClientParameters, AwsCredentials, S3Bucket

    key, secret = server.keys["owner"]
    given = {"aws_access_key_id": key, "aws_secret_access_key": secret} | credentials
    parameters = AwsClientParameters(endpoint_url=server.endpoint_url)
    block = S3Bucket(
        bucket_name=server.bucket,
        bucket_folder=folder,
        credentials=AwsCredentials(
            **({"aws_client_parameters": parameters, "region_name": "us-east-1"} | given)
        ),
    )
    block.save(name, overwrite=True)
    return block


def test_every_kind_of_reference_works_on_ceph(ceph_server, monkeypatch, tmp_path):
    """AwsCredentials, MinIOCredentials, s3fs and the AWS chain reach the same objects, with all
    that a storage needs."""
    from prefect.filesystems import LocalFileSystem, RemoteFileSystem
    from prefect_aws import AwsClientParameters, MinIOCredentials, S3Bucket

    key, secret = ceph_server.keys["owner"]
    endpoint = ceph_server.endpoint_url
    _save_s3_bucket("ceph-aws", ceph_server, folder="kinds")
    minio = MinIOCredentials(
        minio_root_user=key,
        minio_root_password=secret,
        aws_client_parameters=AwsClientParameters(endpoint_url=endpoint),
    )
    S3Bucket(bucket_name="bucket", bucket_folder="kinds", credentials=minio).save("ceph-minio")
    settings = {"key": key, "secret": secret, "endpoint_url": endpoint}
    RemoteFileSystem(basepath="s3://bucket/kinds", settings=settings).save("ceph")
    LocalFileSystem(basepath=str(tmp_path)).save("beside-ceph")
    chain = {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": key,
        "AWS_SECRET_ACCESS_KEY": secret,
    }
    for name, value in chain.items():
        monkeypatch.setenv(name, value)
    references = (
        "s3-bucket/ceph-aws",
        "s3-bucket/ceph-minio",
        "remote-file-system/ceph",
        "s3://bucket/kinds",
    )
    storages = [resolve_storage(reference) for reference in references]
    for number, storage in enumerate(storages):
        storage.check_writable()
        storage.write(f"object/{number}", b"1")
        assert storage.write_if_absent("claim", b"1") is (number == 0)
    keys = ["claim", *(f"object/{number}" for number in range(4))]
    for storage in storages:
        assert [found.key for found in storage.list()] == keys
        assert storage.uri == "s3://bucket/kinds"
        assert secret not in repr(storage)
    local = resolve_storage("local-file-system/beside-ceph")
    local.check_writable()


def test_an_s3_bucket_works_and_writes_where_the_block_does(s3_server):
    """Credentials, endpoint and folder of the block are used: the block reads what the storage
    wrote."""
    block = _save_s3_bucket("aws", s3_server, folder="/blocks/aws/")
    storage = resolve_storage("s3-bucket/aws")
    assert storage.uri == "s3://bucket/blocks/aws"
    assert storage.endpoint_url == s3_server.endpoint_url
    assert storage.region == "us-east-1"
    storage.check_writable()
    storage.write("folder/object", b"content")
    assert (
        block.credentials.get_client("s3")
        .get_object(Bucket="bucket", Key="blocks/aws/folder/object")["Body"]
        .read()
        == b"content"
    )
    assert pickle.loads(pickle.dumps(storage)).read("folder/object") == b"content"
    assert s3_server.keys["owner"][1] not in repr(storage)


def test_minio_credentials_work(s3_server):
    """The other kind of credentials that an S3Bucket takes."""
    from prefect_aws import AwsClientParameters, MinIOCredentials, S3Bucket

    user, password = s3_server.keys["owner"]
    credentials = MinIOCredentials(
        minio_root_user=user,
        minio_root_password=password,
        aws_client_parameters=AwsClientParameters(endpoint_url=s3_server.endpoint_url),
    )
    S3Bucket(bucket_name="bucket", bucket_folder="blocks/minio", credentials=credentials).save(
        "minio"
    )
    storage = resolve_storage("s3-bucket/minio")
    assert storage == s3_server.storage("blocks/minio")
    storage.check_writable()


def test_client_parameters_are_honoured(s3_server, tmp_path):
    """Certificates, addressing and anonymous use come along."""
    from prefect_aws import AwsClientParameters

    bundle = tmp_path / "ca.pem"
    bundle.write_text("")
    # prefect-aws drops the path of a block that is loaded again, unless verify is on too.
    parameters = AwsClientParameters(
        endpoint_url="https://s3.internal:9000",
        verify=True,
        verify_cert_path=bundle,
        config={
            "s3": {"addressing_style": "virtual"},
            "connect_timeout": 3,
            "read_timeout": 7,
            "retries": {"max_attempts": 1},
        },
    )
    _save_s3_bucket(
        "parameters", s3_server, aws_client_parameters=parameters, aws_session_token="token"
    )
    storage = resolve_storage("s3-bucket/parameters")
    assert isinstance(storage, S3Storage)
    assert (storage.verify, storage.addressing_style, storage.session_token) == (
        str(bundle),
        "virtual",
        "token",
    )
    assert (storage.connect_timeout_s, storage.read_timeout_s, storage.max_attempts) == (3, 7, 2)
    unsigned = AwsClientParameters(
        endpoint_url=s3_server.endpoint_url, verify=False, config={"signature_version": "unsigned"}
    )
    _save_s3_bucket("unsigned", s3_server, aws_client_parameters=unsigned)
    storage = resolve_storage("s3-bucket/unsigned")
    assert storage == S3Storage(
        "bucket",
        "folder",
        endpoint_url=s3_server.endpoint_url,
        region="us-east-1",
        anonymous=True,
        verify=False,
    )


def test_a_profile_is_named_not_resolved(s3_server):
    """A profile's credentials stay on the machines that have it."""
    _save_s3_bucket(
        "profile",
        s3_server,
        aws_access_key_id=None,
        aws_secret_access_key=None,
        profile_name="training",
    )
    storage = resolve_storage("s3-bucket/profile")
    assert (storage.profile, storage.access_key_id, storage.secret_access_key) == (
        "training",
        None,
        None,
    )


def test_blocks_that_cannot_work_say_so(s3_server):
    """A role that would expire, no TLS without an endpoint, a folder that leads elsewhere, half
    a key."""
    from prefect_aws import AwsClientParameters

    _save_s3_bucket("role", s3_server, assume_role_arn="arn:aws:iam::123456789012:role/x")
    with pytest.raises(InvalidParamsError, match=r"s3-bucket/role assumes a role.*profile"):
        resolve_storage("s3-bucket/role")
    _save_s3_bucket("no-tls", s3_server, aws_client_parameters=AwsClientParameters(use_ssl=False))
    with pytest.raises(InvalidParamsError, match=r"s3-bucket/no-tls asks for no TLS"):
        resolve_storage("s3-bucket/no-tls")
    _save_s3_bucket("outside", s3_server, folder="a/../../b")
    with pytest.raises(
        InvalidParamsError, match=r"s3-bucket/outside has a folder that can't be used"
    ):
        resolve_storage("s3-bucket/outside")
    _save_s3_bucket("half", s3_server, aws_access_key_id=None, aws_secret_access_key=SECRET)
    with pytest.raises(InvalidParamsError, match="give both") as caught:
        resolve_storage("s3-bucket/half")
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("where", ["settings", "client_kwargs"])
def test_a_remote_file_system_on_s3_works(s3_server, where):
    """The names that fsspec has for key, secret and endpoint, in either place."""
    from prefect.filesystems import RemoteFileSystem

    key, secret = s3_server.keys["owner"]
    if where == "settings":
        settings = {"key": key, "secret": secret, "endpoint_url": s3_server.endpoint_url}
    else:
        kwargs = {"endpoint_url": s3_server.endpoint_url, "region_name": "us-east-1"}
        settings = {
            "client_kwargs": {**kwargs, "aws_access_key_id": key, "aws_secret_access_key": secret}
        }
    RemoteFileSystem(basepath=f"s3://bucket/remote/{where}/", settings=settings).save(
        where.replace("_", "-")
    )
    storage = resolve_storage(f"remote-file-system/{where.replace('_', '-')}")
    assert storage.uri == f"s3://bucket/remote/{where}"
    storage.check_writable()


def test_other_remote_file_systems_are_refused():
    """What can't be written conditionally is refused by its scheme."""
    from prefect.filesystems import RemoteFileSystem

    RemoteFileSystem(basepath="gcs://bucket/folder", settings={"token": SECRET}).save("google")
    with pytest.raises(
        InvalidParamsError,
        match=r"remote-file-system/google is of the kind gcs://.*use an S3 bucket",
    ) as caught:
        resolve_storage("remote-file-system/google")
    assert SECRET not in str(caught.value)


def test_a_local_file_system_is_a_directory(tmp_path):
    """Its basepath is the root; without one each process would write elsewhere."""
    from prefect.filesystems import LocalFileSystem

    LocalFileSystem(basepath=str(tmp_path)).save("here")
    assert resolve_storage("local-file-system/here") == DirectoryStorage(tmp_path)
    LocalFileSystem().save("nowhere")
    with pytest.raises(InvalidParamsError, match="no basepath"):
        resolve_storage("local-file-system/nowhere")


@pytest.mark.parametrize("slug", ["s3-bucket", "remote-file-system", "local-file-system"])
def test_an_unknown_block_is_named_with_the_way_to_register_it(slug):
    """Never a folder of that name by mistake."""
    with pytest.raises(
        InvalidParamsError, match=rf"there is no block {slug}/no-such-block .*register it"
    ):
        resolve_storage(f"{slug}/no-such-block")
    with pytest.raises(InvalidParamsError, match=rf"there is no block {slug}/No such block "):
        resolve_storage(f"{slug}/No such block")


@pytest.mark.parametrize(
    "path",
    [
        "./s3-bucket/name",
        "s3-bucket/a/b",
        "s3-bucket",
        "other/name",
        "S3-bucket/name",
        "/s3-bucket/name",
    ],
)
def test_everything_else_is_a_path_or_a_uri(path, tmp_path, monkeypatch):
    """Only the three slugs followed by one name are blocks."""
    monkeypatch.chdir(tmp_path)
    assert resolve_storage(path) == DirectoryStorage(Path(path))
    assert resolve_storage("s3://bucket/p") == S3Storage("bucket", "p")


def test_it_works_in_an_async_flow(tmp_path):
    """Prefect's own load would return a coroutine there."""
    from prefect.filesystems import LocalFileSystem

    LocalFileSystem(basepath=str(tmp_path)).save("async", overwrite=True)

    async def resolve():
        return resolve_storage("local-file-system/async")

    assert asyncio.run(resolve()) == DirectoryStorage(tmp_path)
