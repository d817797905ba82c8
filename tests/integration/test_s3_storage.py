"""The storage in a bucket, against a real server: the conformance suite, refusals, and a wire that is cut."""

import dataclasses
import hashlib
import multiprocessing
import pickle
import socket

import pytest

from prefect_torch_ddp.errors import BadKeyError, InvalidParamsError, ObjectNotFoundError, StorageError
from prefect_torch_ddp.storage import s3
from prefect_torch_ddp.storage.locate import storage_from_uri
from prefect_torch_ddp.storage.s3 import S3Storage
from prefect_torch_ddp.storage.s3_client import client_of
from tests.integration.s3_server import (  # noqa: F401 - fixtures
    Wire,
    answer,
    cut_in_the_body,
    free_port,
    lose_the_answer,
    open_s3_server,
    s3_server,
)
from tests.storage_conformance import StorageConformance, in_processes

SECRET = "hunter2-is-the-secret"


class TestS3Storage(StorageConformance):
    """Everything a storage must do."""

    num_examples = 20

    @pytest.fixture
    def make_storage(self, s3_server):  # noqa: F811
        """Make storages under prefixes of their own."""
        return s3_server.storage


@pytest.fixture
def storage(s3_server):  # noqa: F811
    """Give a storage under an empty prefix."""
    return s3_server.storage()


@pytest.fixture
def wire(open_s3_server):  # noqa: F811
    """Give a wire to the open server."""
    with Wire(open_s3_server.endpoint_url) as wire:
        yield wire


@pytest.fixture
def over_wire(open_s3_server, wire):  # noqa: F811
    """Give a storage behind the wire."""
    return open_s3_server.storage(endpoint_url=wire.endpoint_url)


# ---- Refusals: each names bucket, key and the way out, and shows no secret.


def _error(operation, *arguments):
    with pytest.raises(StorageError) as caught:
        operation(*arguments)
    return str(caught.value)


def test_a_wrong_secret_is_named(s3_server):  # noqa: F811
    """The key is known, the secret is wrong."""
    storage = s3_server.storage(secret_access_key=SECRET)
    message = _error(storage.write, "folder/object", b"x")
    assert f"s3://bucket/{storage.prefix}/folder/object at {s3_server.endpoint_url}" in message
    assert "the secret is wrong" in message
    assert SECRET not in message


def test_an_unknown_access_key_is_named(s3_server):  # noqa: F811
    """The store doesn't know who asks."""
    storage = s3_server.storage(access_key_id="AKIANOBODY", secret_access_key=SECRET)
    message = _error(storage.read, "object")
    assert "doesn't know this access key" in message
    assert SECRET not in message


def test_missing_rights_are_named(s3_server):  # noqa: F811
    """A user who may only read is told which rights are needed, by the probe too, and the first fault is the one told."""
    owned = s3_server.storage()
    owned.write("object", b"1")
    storage = s3_server.storage(owned.prefix, user="reader")
    assert storage.read("object") == b"1"
    for operation, *arguments in ((storage.write, "a", b"x"), (storage.check_writable,)):
        message = _error(operation, *arguments)
        assert message.startswith("can't write")
        assert "PutObject" in message


def test_a_missing_bucket_is_named(s3_server):  # noqa: F811
    """Each operation says that the bucket isn't there; none takes it for an absent object."""
    storage = s3_server.storage(bucket="no-such-bucket")
    for operation, *arguments in (
        (storage.read, "object"),
        (storage.write, "object", b"x"),
        (storage.write_if_absent, "object", b"x"),
        (lambda: list(storage.list()),),
        (storage.check_writable,),
    ):
        with pytest.raises(StorageError, match=r"s3://no-such-bucket/.*there is no such bucket") as caught:
            operation(*arguments)
        assert not isinstance(caught.value, ObjectNotFoundError)


def test_an_unreachable_endpoint_is_named():
    """Nobody listens: the endpoint is in the message."""
    endpoint = f"http://127.0.0.1:{free_port()}"
    storage = S3Storage("bucket", endpoint_url=endpoint, access_key_id="k", secret_access_key=SECRET, max_attempts=2)
    message = _error(storage.read, "object")
    assert endpoint in message
    assert "can't be reached" in message
    assert SECRET not in message


def test_a_silent_endpoint_is_given_up():
    """A server that takes the request and never answers doesn't hold a run for ever."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        storage = S3Storage(
            "bucket",
            endpoint_url=f"http://127.0.0.1:{listener.getsockname()[1]}",
            access_key_id="k",
            secret_access_key=SECRET,
            read_timeout_s=0.3,
            max_attempts=2,
        )
        assert "didn't answer in time" in _error(storage.read, "object")


def test_no_credentials_are_named(monkeypatch, tmp_path):
    """Where the machine has none, the message says how to give some."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("BOTO_CONFIG", str(tmp_path / "none"))
    storage = S3Storage("bucket", "no-credentials", endpoint_url=f"http://127.0.0.1:{free_port()}")
    assert "there are no credentials: register an s3-bucket block" in _error(storage.read, "object")
    missing_profile = S3Storage("bucket", profile="no-such-profile", region="us-east-1")
    assert "no such AWS profile" in _error(missing_profile.read, "object")


@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [
        (403, "RequestTimeTooSkewed", "clock"),
        (400, "AuthorizationHeaderMalformed", "region"),
        (400, "ExpiredToken", "expired"),
        (501, "NotImplemented", "conditional writes"),
        (507, "SomeStoresOwnCode", "full"),
        (418, "Teapot", "manual"),
    ],
)
def test_other_refusals_say_what_to_do(wire, over_wire, status, code, expected):
    """The clock, the region, the token, a store that can't: each has its way out, and the store's code."""
    storage = dataclasses.replace(over_wire, max_attempts=1)
    wire.faults = [("PUT", answer(status, code))]
    message = _error(storage.write_if_absent, "object", b"x")
    assert expected in message
    assert code in message


def test_secrets_are_not_shown():
    """Neither repr nor str shows what a log must not hold; pickle carries it."""
    storage = S3Storage("b", access_key_id="k", secret_access_key=SECRET, session_token=SECRET)
    for text in (repr(storage), str(storage), f"{storage}", storage.uri):
        assert SECRET not in text
    assert pickle.loads(pickle.dumps(storage)).secret_access_key == SECRET


@pytest.mark.parametrize(
    "make",
    [
        lambda: S3Storage(""),
        lambda: S3Storage("a/b"),
        lambda: S3Storage("b", access_key_id="k"),
        lambda: S3Storage("b", secret_access_key=SECRET),
        lambda: S3Storage("b", anonymous=True, access_key_id="k", secret_access_key=SECRET),
        lambda: S3Storage("b", endpoint_url="minio:9000"),
        lambda: S3Storage("b", endpoint_url=f"http://user:{SECRET}@minio:9000"),
    ],
)
def test_impossible_descriptions_are_refused(make):
    """What can't work is refused when it is written down, without the secret."""
    with pytest.raises(InvalidParamsError) as caught:
        make()
    assert SECRET not in str(caught.value)


def test_a_key_too_long_with_its_prefix_is_refused():
    """S3 counts the prefix too."""
    storage = S3Storage("b", "p" * 200)
    with pytest.raises(BadKeyError, match="shorten the prefix"):
        storage.write("/".join(["k" * 200] * 4) + "/" + "k" * 90, b"")


# ---- What the network does to requests.


def test_a_body_that_breaks_off_is_read_again(wire, over_wire):
    """The retries of botocore end where the body begins; ours don't."""
    data = bytes(range(256)) * 2000
    over_wire.write("object", data)
    wire.faults = [("GET", cut_in_the_body)] * 3
    assert over_wire.read("object") == data
    assert wire.count("GET") == 4
    assert wire.faults == []


def test_a_body_that_always_breaks_off_is_an_error(wire, over_wire):
    """Retries are bounded, and a part is never taken for the whole."""
    over_wire.write("object", b"x" * 100_000)
    wire.faults = [("GET", cut_in_the_body)] * 20
    storage = dataclasses.replace(over_wire, max_attempts=2)
    assert "broke off 2 times" in _error(storage.read, "object")
    assert wire.count("GET") == 2


def test_a_write_whose_answer_is_lost_is_still_a_win(wire, over_wire):
    """The object is there by our own first try: the second try's 412 doesn't make us a loser."""
    wire.faults = [("PUT", lose_the_answer)]
    assert over_wire.write_if_absent("claim", b"mine") is True
    assert [exchange.status for exchange in wire.exchanges if exchange.method == "PUT"] == [200, 412]
    assert over_wire.read("claim") == b"mine"


def test_a_lost_answer_does_not_make_a_loser_win(wire, over_wire):
    """The same cut, but someone else was there first, with the very same bytes."""
    assert over_wire.write_if_absent("claim", b"same") is True
    wire.faults = [("PUT", lose_the_answer)]
    assert over_wire.write_if_absent("claim", b"same") is False


def test_a_conflict_is_tried_again(wire, over_wire):
    """AWS answers 409 while another conditional write is under way, which decides nothing."""
    wire.faults = [("PUT", answer(409, "ConditionalRequestConflict")), ("PUT", answer(409, "ConditionalRequestConflict"))]
    assert over_wire.write_if_absent("claim", b"mine") is True
    wire.faults = [("PUT", answer(409, "ConditionalRequestConflict"))]
    assert over_wire.write_if_absent("claim", b"other") is False
    assert over_wire.read("claim") == b"mine"


def test_conflicts_without_end_are_an_error(wire, over_wire):
    """Bounded too."""
    wire.faults = [("PUT", answer(409, "ConditionalRequestConflict"))] * 20
    storage = dataclasses.replace(over_wire, max_attempts=2)
    assert "ConditionalRequestConflict" in _error(storage.write_if_absent, "claim", b"x")
    assert wire.count("PUT") == 2


def test_a_busy_store_is_asked_again(wire, over_wire):
    """503 and 500 pass."""
    over_wire.write("object", b"x")
    wire.faults = [("GET", answer(503, "SlowDown")), ("GET", answer(500, "InternalError"))]
    assert over_wire.read("object") == b"x"


def test_a_store_that_ignores_conditions_is_refused(open_s3_server):  # noqa: F811
    """The probe finds out that the second conditional write won, says what that means, and cleans up."""
    with Wire(open_s3_server.endpoint_url, without_header="if-none-match") as wire:
        storage = open_s3_server.storage(endpoint_url=wire.endpoint_url)
        with pytest.raises(StorageError, match=r"doesn't honour conditional writes .*two runs could commit"):
            storage.check_writable()
        assert list(storage.list()) == []


def test_anonymous_requests_are_not_signed(wire, open_s3_server):  # noqa: F811
    """A public bucket is read without credentials."""
    client = client_of(open_s3_server.storage())
    client.put_object(Bucket="bucket", Key="public/object", Body=b"1", ACL="public-read")
    client.put_object(Bucket="bucket", Key="public/private", Body=b"2")
    storage = S3Storage("bucket", "public", endpoint_url=wire.endpoint_url, anonymous=True)
    assert storage.read("object") == b"1"
    assert "Authorization" not in wire.exchanges[-1].headers
    assert "access denied" in _error(storage.read, "private")


def test_the_environment_of_the_process_is_used(monkeypatch, s3_server):  # noqa: F811
    """A plain s3:// URI takes endpoint and credentials where AWS's own tools find them."""
    key, secret = s3_server.keys["owner"]
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server.endpoint_url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    storage = storage_from_uri("s3://bucket/from-the-environment")
    storage.check_writable()
    assert s3_server.endpoint_url in _error(storage.read, "absent")


# ---- Sizes, pages, processes.


def test_big_objects_go_in_parts_and_come_back_whole(monkeypatch, wire, over_wire):
    """Above the limit an object is uploaded in parts, and is one object."""
    monkeypatch.setattr(s3, "MULTIPART_FROM_BYTES", 6 * 2**20)
    monkeypatch.setattr(s3, "PART_BYTES", 5 * 2**20)
    data = hashlib.sha256(b"seed").digest() * (11 * 2**20 // 32)
    over_wire.write("big", data)
    assert wire.count("PUT") == 3
    assert hashlib.sha256(over_wire.read("big")).digest() == hashlib.sha256(data).digest()
    assert [found.num_bytes for found in over_wire.list()] == [len(data)]


def test_a_failed_upload_in_parts_leaves_nothing(monkeypatch, wire, over_wire):
    """When a part is refused the upload is aborted: no object, and no parts that are paid for and never seen."""
    monkeypatch.setattr(s3, "MULTIPART_FROM_BYTES", 6 * 2**20)
    monkeypatch.setattr(s3, "PART_BYTES", 5 * 2**20)
    wire.faults = [("PUT", answer(403, "AccessDenied"))]
    assert "access denied" in _error(over_wire.write, "big", b"x" * (11 * 2**20))
    assert "Uploads" not in client_of(over_wire).list_multipart_uploads(Bucket="bucket", Prefix=over_wire.prefix)
    assert list(over_wire.list()) == []


def _begin_upload(storage, key):
    client = client_of(storage)
    name = f"{storage.prefix}/{key}"
    upload = client.create_multipart_upload(Bucket="bucket", Key=name)["UploadId"]
    client.upload_part(Bucket="bucket", Key=name, UploadId=upload, PartNumber=1, Body=b"part")


def test_uploads_that_a_killed_writer_left_are_dropped(s3_server):  # noqa: F811
    """Those that are over, below the prefix given; not those that somebody may be at, nor a neighbour's."""
    storage, neighbour = s3_server.storage(), s3_server.storage()
    for key in ("run/1/old", "run/2/new", "runs/1/old"):
        _begin_upload(storage, key)
    _begin_upload(neighbour, "run/1/old")
    storage.write("run/1/whole", b"1")
    storage.drop_unfinished("run/", lambda key: key.startswith("run/1/"))
    left = client_of(storage).list_multipart_uploads(Bucket="bucket")["Uploads"]
    expected = {f"{storage.prefix}/run/2/new", f"{storage.prefix}/runs/1/old", f"{neighbour.prefix}/run/1/old"}
    assert {upload["Key"] for upload in left} == expected
    assert storage.read("run/1/whole") == b"1"


def test_the_right_to_list_uploads_may_be_missing(s3_server):  # noqa: F811
    """Then the message names it."""
    storage = s3_server.storage(user="reader")
    assert "ListBucketMultipartUploads" in _error(storage.drop_unfinished, "runs/", lambda key: True)


def test_listings_go_on_over_pages(storage):
    """More than a thousand objects are all listed, in order, and what isn't a key isn't."""
    keys = [f"many/{number:05}" for number in range(1001)]
    client = client_of(storage)
    for key in keys:
        client.put_object(Bucket="bucket", Key=f"{storage.prefix}/{key}", Body=b"")
    client.put_object(Bucket="bucket", Key=f"{storage.prefix}/many/", Body=b"")  # as the console makes a "folder"
    assert [found.key for found in storage.list()] == keys
    assert [found.key for found in storage.list("many/0100")] == ["many/01000"]


def test_a_neighbouring_prefix_is_not_listed(s3_server):  # noqa: F811
    """`runs` isn't the beginning of `runs2`."""
    s3_server.storage("neighbour/runs2").write("x", b"")
    storage = s3_server.storage("neighbour/runs")
    storage.write("y", b"")
    assert [found.key for found in storage.list()] == ["y"]


def _client_id(storage):
    return id(client_of(storage))


def test_a_forked_child_has_a_client_of_its_own(storage):
    """The parent's client, with its kept-alive sockets, is never used by a child."""
    storage.write("object", b"1")
    parent = client_of(storage)
    assert in_processes([(_client_id, storage)]) != [id(parent)]
    assert client_of(storage) is parent


def test_a_storage_crosses_into_a_fresh_process(storage):
    """What is sent to a process that shares nothing with ours works there."""
    storage.write("object", b"1")
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply_async(storage.read, ("object",)).get(60) == b"1"
        pool.close()
        pool.join()
