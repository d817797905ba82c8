"""How a text names a storage; how installed packages add schemes."""

from pathlib import Path

import pytest

from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.storage.directory import DirectoryStorage
from prefect_torch_ddp.storage.locate import opens_by_fsspec, storage_at, storage_from_uri
from prefect_torch_ddp.storage.s3.storage import S3Storage
from tests.support.records import Shelf


@pytest.fixture(autouse=True)
def _at_home(tmp_path, monkeypatch):
    """Make home and the current folder known."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("uri", "path"),
    [
        ("/data/runs", "/data/runs"),
        ("~", "{home}"),
        ("~/runs", "{home}/runs"),
        ("runs/x", "{home}/runs/x"),
        ("x/../runs", "{home}/runs"),
        ("./s3-bucket/name", "{home}/s3-bucket/name"),
        ("./s3:x", "{home}/s3:x"),
        ("runs/2026:11", "{home}/runs/2026:11"),
    ],
)
def test_paths(uri, path, tmp_path):
    """A path and `~` are a directory, absolute: the same folder in every process."""
    storage = storage_from_uri(uri)
    assert isinstance(storage, DirectoryStorage)
    assert storage.uri == str(storage.root) == path.format(home=tmp_path)


@pytest.mark.parametrize(
    ("uri", "bucket", "prefix"),
    [
        ("s3://b", "b", ""),
        ("s3://b/", "b", ""),
        ("s3://b/p/q/", "b", "p/q"),
        ("S3://b/p", "b", "p"),
    ],
)
def test_buckets(uri, bucket, prefix):
    """s3:// is a bucket and a prefix, with whatever credentials are found."""
    storage = storage_from_uri(uri)
    assert storage == S3Storage(bucket, prefix)
    assert storage.uri == f"s3://{bucket}/{prefix}".rstrip("/")


@pytest.mark.parametrize(
    "uri",
    [
        *("", "  ", " /data", "/data\n", "a\0b", "gs://b/p", "az://c", "http://host/p"),
        *("C:\\runs", "c:/runs", "s3:b", "s3:/b", "s3a://b", "s3://", "s3:///p", "s3://b?x=1"),
        *("s3://b/p?x=1", "s3://b/p#x", "s3://b c/p", "s3://b/../c", "s3://b//c"),
        *("s3://b:9000/p", "file:///runs", "~no-such-user-here/x"),
        # A secret would end up in logs; the refusal doesn't put it there either.
        *("s3://AKIA:hunter2@bucket/p", "s3://AKIA:hun/hunter2@bucket", "s3://b?secret=hunter2"),
        *("https://u:hunter2@host/b", "file://u:hunter2@host/b"),
    ],
)
def test_anything_else_is_refused_with_what_to_write(uri):
    """Nothing is guessed: the message says what would work."""
    with pytest.raises(InvalidParamsError, match=r"write|remove") as caught:
        storage_from_uri(uri)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("uri", ["s3a://b/p", "S3N://AKIA:hunter2@b"])
def test_hadoops_names_of_s3_are_refused_with_what_to_write(uri, install):
    """As Spark writes URIs; unless a package has that scheme."""
    says = "^s3[an]: is how Hadoop and Spark write s3:; write s3:// in its place$"
    for access in ({}, {"region": "here"}):
        with pytest.raises(InvalidParamsError, match=says):
            storage_from_uri(uri, **access)
    install("hadoop", s3a=f"{__name__}:shelf_of", s3n=f"{__name__}:shelf_of")
    assert storage_from_uri(uri) == Shelf(uri=uri)


@pytest.mark.parametrize(
    ("uri", "says"),
    [
        ("s3//AKIA:hunter2@b/p", "^s3// lacks its colon: write s3://; a folder .* ./s3//...$"),
        ("S3//b", "^S3// lacks its colon: write s3://; a folder .* ./S3//...$"),
        ("https//host/raw.zip", "^https// lacks its colon: write https://"),
        ("shelf//b", "^shelf// lacks its colon: write shelf://"),
        ("s3:/b/p", "^s3: names no known storage; write s3:// at its beginning, with two slashes"),
        ("s3:hunter2", "^s3: names no known storage; write s3:// at its beginning, with two"),
        ("shelf:/b", "^shelf: names no known storage; write shelf:// at its beginning, with two"),
    ],
)
def test_a_uri_without_its_colon_or_a_slash_is_no_folder(uri, says, install):
    """The refusal says what was probably meant, and shows no secret."""
    install("shelves", shelf=f"{__name__}:shelf_of")
    for access in ({}, {"region": "here"}):
        with pytest.raises(InvalidParamsError, match=says) as caught:
            storage_from_uri(uri, **access)
    assert "hunter2" not in str(caught.value)
    # An ordinary folder may have two slashes, and this one too if it is meant.
    assert storage_from_uri("runs//b").uri.endswith("/runs/b")
    assert storage_from_uri("./s3//b").uri.endswith("/s3/b")


def test_what_is_a_storage_stays_one():
    """A function that takes a storage or its name has no other rule for names."""
    storage = S3Storage("bucket", region="here")
    assert storage_at(storage) is storage
    assert storage_at("s3://bucket/p") == S3Storage("bucket", "p")
    assert storage_at(Path("runs")) == storage_at("runs") == DirectoryStorage(Path("runs"))
    with pytest.raises(InvalidParamsError, match="a dict isn't a storage; give a path, a URI"):
        storage_at({})


def test_how_to_get_to_a_bucket():
    """Options add what an s3:// URI doesn't say, and a folder refuses them."""
    found = storage_from_uri("s3://b/p", region="here", anonymous=True)
    assert found == S3Storage("b", "p", region="here", anonymous=True)
    with pytest.raises(InvalidParamsError, match="runs is a folder; region belong to an s3:// URI"):
        storage_from_uri("runs", region="here")


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Give a function that installs a package which names storages, as pip would do it."""

    def install(package: str, **storages: str) -> None:
        site = tmp_path / f"site of {package}"
        about = site / f"{package}-1.0.dist-info"
        about.mkdir(parents=True)
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        lines = [f"{scheme} = {value}" for scheme, value in storages.items()]
        text = "\n".join(["[prefect_torch_ddp.storages]", *lines, ""])
        (about / "entry_points.txt").write_text(text)
        monkeypatch.syspath_prepend(site)

    return install


def shelf_of(uri: str) -> Shelf:
    """Make the storage of a shelf: URI."""
    return Shelf(uri=uri)


def test_an_installed_package_adds_a_scheme(install):
    """Its entry point is called with the whole URI, whose scheme may be in either case."""
    install("shelves", shelf=f"{__name__}:shelf_of")
    assert storage_from_uri("shelf://host:80/a b?c") == Shelf(uri="shelf://host:80/a b?c")
    assert storage_from_uri("Shelf://x") == Shelf(uri="Shelf://x")
    assert not opens_by_fsspec("shelf://x")
    assert all(map(opens_by_fsspec, ("shelf", "./shelf:x", "s3://x", "other://x")))
    for wrong in ("shelf:x", "shelves://x"):
        with pytest.raises(InvalidParamsError, match="names no known storage; write"):
            storage_from_uri(wrong)


def test_a_package_cannot_replace_a_scheme_that_comes_along(install):
    """s3:// is the same with and without it."""
    install("shelves", s3=f"{__name__}:shelf_of")
    assert storage_from_uri("s3://b") == S3Storage("b")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("no_such_module:make", "can't be loaded: No module named 'no_such_module'; install"),
        ("os:no_such_name", "can't be loaded: module 'os' has no attribute"),
        ("builtins:str", "builtins:str made a str of a shelf: URI, and has to return a Storage"),
    ],
    ids=["no module", "no name", "no storage"],
)
def test_a_package_that_is_broken_is_named(install, value, words):
    """The error says which entry point it is, and what is wrong with it."""
    install("shelves", shelf=value)
    with pytest.raises(InvalidParamsError, match=words):
        storage_from_uri("shelf://x")


def test_two_packages_of_one_scheme_are_refused(install):
    """Neither is chosen by chance."""
    install("one", shelf="one:make")
    install("two", shelf="two:make")
    with pytest.raises(InvalidParamsError, match=r"several packages, (one|two):make, (one|two):"):
        storage_from_uri("shelf://x")
