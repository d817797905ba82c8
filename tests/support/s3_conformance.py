"""What a storage on S3 must do beyond the suite of all storages: refusals that help, and a
network that fails."""

import dataclasses
import hashlib
import re
from collections.abc import Iterator

import pytest

from prefect_torch_ddp.errors import DamagedObjectError, ObjectNotFoundError, StorageError
from prefect_torch_ddp.storage.protocol import ObjectPart
from prefect_torch_ddp.storage.s3 import retries as s3_attempts
from prefect_torch_ddp.storage.s3 import storage as s3_storage
from prefect_torch_ddp.storage.s3.client import client_of
from prefect_torch_ddp.storage.s3.storage import S3Storage
from tests.support.s3_server import S3Server, Wire, answer, cut_in_the_body, lose_the_answer, send
from tests.support.wire_faults import (
    change_a_byte,
    change_the_etag,
    never_answer,
    reset_in_the_body,
    truncate,
)

SECRET = "hunter2-is-the-secret"


class S3Conformance:
    """The suite.

    A subclass gives the fixture `server`, with the users `owner`, who may do all, and `reader`.
    """

    @pytest.fixture
    def storage(self, server: S3Server) -> S3Storage:
        """Give a storage under an empty prefix."""
        return server.storage()

    @pytest.fixture
    def wire(self, server: S3Server) -> Iterator[Wire]:
        """Give a wire to the server; signatures hold, since nothing in a request is changed."""
        with Wire(server.endpoint_url) as wire:
            yield wire

    @pytest.fixture
    def over_wire(self, server: S3Server, wire: Wire) -> S3Storage:
        return server.storage(endpoint_url=wire.endpoint_url)

    @pytest.fixture(autouse=True)
    def _short_pauses(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(s3_attempts, "PAUSE_S", 0.02)

    @pytest.fixture
    def in_small_parts(self, monkeypatch: pytest.MonkeyPatch) -> bytes:
        """Have eleven megabytes be an upload of three parts; give them."""
        monkeypatch.setattr(s3_storage, "MULTIPART_FROM_BYTES", 6 * 2**20)
        monkeypatch.setattr(s3_storage, "PART_BYTES", 5 * 2**20)
        return hashlib.sha256(b"seed").digest() * (11 * 2**20 // 32)

    # ---- Refusals: each names bucket, key and the way out, and shows no secret.

    def test_a_wrong_secret_is_named(self, server):
        """The key is known, the secret is wrong; each operation says so."""
        storage = server.storage(secret_access_key=SECRET)
        for verb, key, operation, *arguments in (
            ("write", "/folder/object", storage.write, "folder/object", b"x"),
            ("write", "/claim", storage.write_if_absent, "claim", b"x"),
            ("read", "/object", storage.read, "object"),
            ("delete", "/object", storage.delete, "object"),
            ("list", "/", lambda: list(storage.list())),
        ):
            message = error_of(operation, *arguments)
            assert message.startswith(
                f"can't {verb} s3://bucket/{storage.prefix}{key} at {server.endpoint_url}: "
            ), message
            assert "the secret is wrong: check the access key" in message
        (unread,) = storage.read_many([ObjectPart("object", 1)])
        assert type(unread) is StorageError  # not one that on_error="skip" would skip
        assert "the secret is wrong" in str(unread)
        storage = server.storage(access_key_id="AKIANOBODY", secret_access_key=SECRET)
        assert "doesn't know this access key" in error_of(storage.read, "object")

    def test_missing_rights_are_named(self, server):
        """The error of a user who may only read names the missing rights and the first
        fault, in the probe too."""
        owned = server.storage()
        owned.write("object", b"1")
        storage = server.storage(owned.prefix, user="reader")
        assert storage.read("object") == b"1"
        assert [found.key for found in storage.list()] == ["object"]
        for operation, *arguments in ((storage.write, "a", b"x"), (storage.check_writable,)):
            message = error_of(operation, *arguments)
            assert message.startswith(f"can't write s3://bucket/{storage.prefix}/")
            assert "PutObject" in message
        assert "DeleteObject" in error_of(storage.delete, "object")
        message = error_of(storage.drop_unfinished, "runs/", lambda key: True)
        assert "ListBucketMultipartUploads" in message
        assert owned.read("object") == b"1"

    def test_a_missing_bucket_is_named(self, server):
        """Each operation says that the bucket isn't there; none reports an absent object
        instead."""
        storage = server.storage(bucket="no-such-bucket")
        for operation, *arguments in (
            (storage.read, "object"),
            (storage.write, "object", b"x"),
            (storage.write_if_absent, "object", b"x"),
            (lambda: list(storage.list()),),
            (storage.check_writable,),
        ):
            message = error_of(operation, *arguments)
            assert re.search(r"s3://no-such-bucket/.*there is no such bucket", message)

    def test_a_wrong_region_is_found_or_named(self, wire, over_wire):
        """A wrong region is corrected from the store's answer as AWS gives it, or named."""
        elsewhere = answer(400, "AuthorizationHeaderMalformed", "<Region>eu-central-1</Region>")
        wire.faults = [("PUT", elsewhere)]
        over_wire.write("object", b"x")
        assert "/eu-central-1/s3/" in wire.exchanges[-1].headers["Authorization"]
        wire.faults = [("PUT", elsewhere)] * 2
        message = error_of(over_wire.write, "object", b"x")
        assert (
            "signed for another region: give the bucket's region, in the block or as "
            "AWS_DEFAULT_REGION: eu-central-1" in message
        )

    def test_an_endpoint_without_tls_is_named(self, server):
        """https:// to a port that speaks plain HTTP: not tried again, since it won't get
        better."""
        storage = server.storage(endpoint_url=server.endpoint_url.replace("http://", "https://"))
        message = error_of(storage.read, "object")
        assert "write http:// if it has no TLS" in message
        assert "tried" not in message

    # ---- What the network does to requests and answers.

    @pytest.mark.parametrize(
        "fault", [cut_in_the_body, reset_in_the_body, truncate, change_a_byte, change_the_etag]
    )
    def test_a_damaged_answer_is_read_again(self, wire, over_wire, fault):
        """Our retries cover the body of an answer, which botocore's don't."""
        data = bytes(range(256)) * 2000
        over_wire.write("object", data)
        wire.faults = [("GET", fault)] * 3
        assert over_wire.read("object") == data
        assert wire.count("GET") == (
            1 if fault is change_the_etag else 4
        )  # we carry a digest of our own

    def test_a_body_that_always_breaks_off_is_an_error(self, wire, over_wire):
        """Retries are bounded, and a part never counts as the whole."""
        over_wire.write("object", b"x" * 100_000)
        storage = dataclasses.replace(over_wire, max_attempts=2)
        wire.faults = [("GET", cut_in_the_body)] * 20
        assert re.search(
            r"the content broke off: .*tried 2 times", error_of(storage.read, "object")
        )
        assert wire.count("GET") == 2
        wire.faults = [("GET", truncate)] * 20
        with pytest.raises(
            DamagedObjectError,
            match=rf"s3://bucket/{storage.prefix}/object .*sha256 is not .*tried 2 times",
        ):
            storage.read("object")
        assert wire.count("GET") == 4

    @pytest.mark.parametrize(
        "fault", [cut_in_the_body, truncate, answer(503, "SlowDown"), lose_the_answer]
    )
    def test_a_listing_is_never_a_part_of_one(self, wire, over_wire, fault):
        """An answer that can't be read whole is asked for again."""
        for key in ("a", "b", "c"):
            over_wire.write(key, b"")
        wire.faults = [("GET", fault)] * 2
        assert [found.key for found in over_wire.list()] == ["a", "b", "c"]
        storage = dataclasses.replace(over_wire, max_attempts=2)
        wire.faults = [("GET", fault)] * 2
        assert f"can't list s3://bucket/{storage.prefix}/ at" in error_of(
            lambda: list(storage.list())
        )

    @pytest.mark.parametrize(
        "fault",
        [answer(503, "SlowDown"), answer(500, "InternalError"), answer(429, "TooManyRequests")],
    )
    def test_a_busy_store_is_asked_again(self, wire, over_wire, fault):
        """Each operation outlasts 503, 500 and 429, with a limited number of requests."""
        methods = ("PUT", "GET", "DELETE")
        wire.faults = [(method, fault) for method in methods]
        over_wire.write("object", b"x")
        assert over_wire.read("object") == b"x"
        over_wire.delete("object")
        storage = dataclasses.replace(over_wire, max_attempts=3)
        wire.faults = [("PUT", fault)] * 20
        before = wire.count("PUT")
        assert "the store is overloaded or down" in error_of(storage.write, "object", b"x")
        assert wire.count("PUT") - before == 3

    def test_pauses_grow_and_differ(self, wire, over_wire, monkeypatch):
        """So that ranks that failed together don't come back together, and a busy store is left
        in peace."""
        monkeypatch.setattr(s3_attempts, "PAUSE_S", 0.25)
        pauses: list[list[float]] = []
        monkeypatch.setattr(s3_attempts.time, "sleep", lambda pause_s: pauses[-1].append(pause_s))  # noqa: PLW0108 - grows
        for _ in range(5):
            pauses.append([])
            wire.faults = [("PUT", answer(503, "SlowDown"))] * 5
            error_of(over_wire.write, "object", b"x")
        for waited in pauses:
            assert len(waited) == 4
            assert all(
                2 ** (n - 3) <= pause_s <= 2 ** (n - 2) for n, pause_s in enumerate(waited, start=1)
            ), waited
        assert len({tuple(waited) for waited in pauses}) == 5

    def test_a_silent_store_is_given_up(self, wire, over_wire):
        """One that takes the connection and never answers: given up after a time, whatever the
        number of attempts, which would take eight minutes."""
        over_wire.write("object", b"x")
        storage = dataclasses.replace(
            over_wire, read_timeout_s=0.5, give_up_after_s=4.0, max_attempts=1000
        )
        wire.outage = lambda: never_answer
        for operation, *arguments in (
            (storage.read, "object"),
            (storage.write, "object", b"y"),
            (storage.delete, "object"),
        ):
            assert re.search(
                r"the endpoint didn't answer in time: .*tried \d+ times",
                error_of(operation, *arguments),
            )
        wire.outage = lambda: None
        assert over_wire.read("object") == b"x"

    # ---- Conditional writes.

    def test_a_write_whose_answer_is_lost_is_still_a_win(self, wire, over_wire):
        """The object is there by our own first try: the second try's 412 doesn't make us a
        loser."""
        wire.faults = [("PUT", lose_the_answer)]
        assert over_wire.write_if_absent("claim", b"mine") is True
        assert [exchange.status for exchange in wire.exchanges if exchange.method == "PUT"] == [
            200,
            412,
        ]
        assert over_wire.read("claim") == b"mine"
        wire.faults = [("PUT", lose_the_answer)]  # somebody else was there first, with the same
        assert over_wire.write_if_absent("claim", b"mine") is False

    def test_a_conflict_is_tried_again(self, wire, over_wire):
        """AWS answers 409 while another conditional write is under way, which decides
        nothing."""
        conflict = answer(409, "ConditionalRequestConflict")
        wire.faults = [("PUT", conflict)] * 2
        assert over_wire.write_if_absent("claim", b"mine") is True
        wire.faults = [("PUT", conflict)]
        assert over_wire.write_if_absent("claim", b"other") is False
        assert over_wire.read("claim") == b"mine"
        wire.faults = [("PUT", conflict)] * 20
        storage, before = dataclasses.replace(over_wire, max_attempts=2), wire.count("PUT")
        assert "ConditionalRequestConflict" in error_of(storage.write_if_absent, "claim", b"x")
        assert wire.count("PUT") - before == 2

    # ---- Uploads in parts.

    def test_big_objects_go_in_parts_and_come_back_whole(self, in_small_parts, wire, over_wire):
        """An object above the limit is uploaded in parts and is one object, also if requests
        fail."""
        over_wire.write("big", in_small_parts)
        assert wire.count("PUT") == 3
        for faults in (
            [
                ("POST", answer(503, "SlowDown")),
                ("PUT", answer(503, "SlowDown")),
                ("PUT", lose_the_answer),
            ],
            [("POST", lose_the_answer), ("PUT", answer(500, "InternalError"))],
            [("GET", truncate)],
        ):
            wire.faults = list(faults)
            over_wire.write("big", memoryview(in_small_parts))
            assert (
                hashlib.sha256(over_wire.read("big")).digest()
                == hashlib.sha256(in_small_parts).digest()
            )
            assert wire.faults == []
        assert [found.num_bytes for found in over_wire.list()] == [len(in_small_parts)]

    def test_big_objects_are_read_in_parts(self, in_small_parts, wire, over_wire):
        """Also where faults hit any of them, without reading the others again; never parts of
        two objects."""
        over_wire.write("big", in_small_parts)
        assert over_wire.read("big") == in_small_parts
        assert wire.count("GET") == 3
        for fault in (cut_in_the_body, truncate, answer(503, "SlowDown")):
            before = wire.count("GET")
            wire.faults = [("GET", _pass_on), ("GET", fault)]
            assert over_wire.read("big") == in_small_parts
            assert wire.count("GET") - before == 4

        def overwrite(handler, exchange):
            over_wire.write("big", in_small_parts[::-1])
            _pass_on(handler, exchange)

        wire.faults = [("GET", overwrite)]
        assert over_wire.read("big") == in_small_parts[::-1]

    def test_an_end_whose_answer_is_lost_is_the_end(self, in_small_parts, wire, over_wire):
        """The store did it: asked again it knows of no such upload, and the object is there."""
        wire.faults = [("POST", _pass_on), ("POST", lose_the_answer)]
        over_wire.write("big", in_small_parts)
        assert [exchange.status for exchange in wire.exchanges if exchange.method == "POST"][
            :2
        ] == [200, 200]
        assert wire.faults == []
        assert over_wire.read("big") == in_small_parts

    @pytest.mark.parametrize(
        "fault", [answer(403, "AccessDenied"), answer(503, "SlowDown"), change_the_etag]
    )
    def test_a_failed_upload_in_parts_leaves_nothing(self, in_small_parts, wire, over_wire, fault):
        """It is aborted: no object, no parts that are paid for and never seen, and the old
        object stays."""
        storage = dataclasses.replace(over_wire, max_attempts=2)
        storage.write("big", b"old")
        wire.faults = [("PUT", fault)] * 6
        message = error_of(storage.write, "big", in_small_parts)
        assert f"can't write s3://bucket/{storage.prefix}/big at {wire.endpoint_url}" in message
        assert "Uploads" not in client_of(storage).list_multipart_uploads(
            Bucket="bucket", Prefix=storage.prefix
        )
        assert [found.key for found in storage.list()] == ["big"]
        assert storage.read("big") == b"old"

    def test_uploads_that_a_killed_writer_left_are_dropped(self, server):
        """Those that are over, below the prefix given; not those that somebody may be at, nor a
        neighbour's."""
        storage, neighbour = server.storage(), server.storage()
        for key in ("run/1/old", "run/2/new", "runs/1/old"):
            _begin_upload(storage, key)
        _begin_upload(neighbour, "run/1/old")
        storage.write("run/1/whole", b"1")
        storage.drop_unfinished("run/", lambda key: key.startswith("run/1/"))
        left = client_of(storage).list_multipart_uploads(Bucket="bucket")["Uploads"]
        expected = {
            f"{storage.prefix}/run/2/new",
            f"{storage.prefix}/runs/1/old",
            f"{neighbour.prefix}/run/1/old",
        }
        assert {upload["Key"] for upload in left} >= expected
        assert f"{storage.prefix}/run/1/old" not in {upload["Key"] for upload in left}
        assert storage.read("run/1/whole") == b"1"
        for each in (storage, neighbour):
            each.drop_unfinished("", lambda key: True)

    # ---- Listings.

    def test_listings_go_on_over_pages(self, storage):
        """More than a thousand objects are all listed in sequence, without names that are no
        keys."""
        keys = [f"many/{number:05}" for number in range(1001)]
        client = client_of(storage)
        for key in keys:
            client.put_object(Bucket="bucket", Key=f"{storage.prefix}/{key}", Body=b"")
        client.put_object(
            Bucket="bucket", Key=f"{storage.prefix}/many/", Body=b""
        )  # as the console makes a "folder"
        assert [found.key for found in storage.list()] == keys
        assert [found.key for found in storage.list("many/0100")] == ["many/01000"]

    def test_what_the_store_damaged_is_an_error(self, storage):
        """Other bytes under the digest of those that were written are never returned. Objects of
        others, without a digest of ours, are read."""
        client_of(storage).put_object(Bucket="bucket", Key=f"{storage.prefix}/theirs", Body=b"1")
        assert storage.read("theirs") == b"1"
        digest = {"sha256": hashlib.sha256(b"written").hexdigest()}
        client_of(storage).put_object(
            Bucket="bucket", Key=f"{storage.prefix}/object", Body=b"wrotten", Metadata=digest
        )
        with pytest.raises(DamagedObjectError, match="look for what changes it on its way"):
            dataclasses.replace(storage, max_attempts=2).read("object")


def error_of(operation, *arguments):
    """Return what the StorageError says, which is no ObjectNotFoundError; no secret is in it,
    nor in its cause."""
    with pytest.raises(StorageError) as caught:
        operation(*arguments)
    assert not isinstance(caught.value, ObjectNotFoundError)
    assert SECRET not in f"{caught.value}{caught.value!r}{caught.value.__cause__!r}"
    return str(caught.value)


def _pass_on(handler, exchange):
    send(handler, exchange, exchange.answer)


def _begin_upload(storage, key):
    client = client_of(storage)
    name = f"{storage.prefix}/{key}"
    upload = client.create_multipart_upload(Bucket="bucket", Key=name)["UploadId"]
    client.upload_part(Bucket="bucket", Key=name, UploadId=upload, PartNumber=1, Body=b"part")
