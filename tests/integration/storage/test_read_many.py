"""Reading many objects gives right bytes and clear errors, whatever the wire and forks do."""

import hashlib
import os
import random
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import botocore.session
import pytest

from prefect_torch_ddp.errors import ObjectChangedError, ObjectNotFoundError, StorageError
from prefect_torch_ddp.storage.directory import DirectoryStorage
from prefect_torch_ddp.storage.protocol import ObjectPart, Readable
from prefect_torch_ddp.storage.s3.client import client_of, connect
from prefect_torch_ddp.storage.s3.read import NUM_MISSES
from tests.support.s3_server import answer, cut_in_the_body, lose_the_answer
from tests.support.storage_conformance import in_processes
from tests.support.wire_faults import change_a_byte, change_the_etag, truncate

NAMES = [
    *("cat/1.jpg", "cat/", "ä b/+&?#%41.png", "notes.txt", "cat/deep/a.jpg", "dog//x..y"),
    "cat.jpg",
]


@pytest.fixture(params=["directory", "s3"])
def storage(request, tmp_path, s3_server):
    """Give either storage."""
    is_directory = request.param == "directory"
    return DirectoryStorage(tmp_path / "root") if is_directory else s3_server.storage()


def fill(storage, num=40, num_bytes=5000):
    """Write objects; return what reads them."""
    contents = [bytes([i]) * num_bytes + os.urandom(20) for i in range(num)]
    for i, content in enumerate(contents):
        storage.write(f"o/{i:03}", content)
    return [part_of(found) for found in storage.list_objects("o/")], contents


def part_of(found):
    """Return what reads a listed object whole."""
    return ObjectPart(found.key, found.num_bytes, None, found.etag)


def test_objects_and_parts_of_them_come_in_order(storage):
    """Objects come in the order of the list, which may repeat one or be empty."""
    parts, contents = fill(storage)
    assert isinstance(storage, Readable)
    assert storage.read_many([]) == []
    assert storage.read_many(parts + parts[:3]) == contents + contents[:3]
    ranges = [replace(part, start=i * 10, num_bytes=i) for i, part in enumerate(parts)]
    expected = [content[i * 10 : i * 11] for i, content in enumerate(contents)]
    assert storage.read_many(ranges) == expected


def test_a_forked_process_parses_no_description_of_a_service(s3_server):
    """One read before the fork is enough, even of no parts; a dataset makes one for its workers."""
    storage = s3_server.storage()
    storage.read_many([])
    (opened,) = in_processes([(opened_by_connect, storage)])
    assert opened == []


def test_a_forked_process_needs_no_client_after_one_read(s3_server):
    """After its parent has read an object, a child reads others by lean GETs alone."""
    storage = s3_server.storage()
    parts, contents = fill(storage, 3)
    assert storage.read_many(parts[:1]) == contents[:1]
    (read,) = in_processes([(read_without_a_client, storage, parts)])
    assert read == contents


def opened_by_connect(storage):
    """Return the files of botocore's that a new client opens."""
    opened = []
    sys.addaudithook(lambda event, found: event == "open" and opened.append(str(found[0])))
    connect(storage)
    return [name for name in opened if "botocore" in name]


def read_without_a_client(storage, parts):
    """Read them where nothing of botocore's can be made."""
    del botocore.session.Session.create_client
    return storage.read_many(parts)


def test_a_failure_is_the_value_of_its_part_alone(storage):
    """Only a missing or changed object has an error as its value."""
    parts, contents = fill(storage, 4)
    storage.delete(parts[0].key)
    storage.write(parts[1].key, b"!" * len(contents[1]))
    parts[2] = replace(parts[2], num_bytes=7, etag=None)
    gone, changed, longer, good = storage.read_many(parts)
    assert isinstance(gone, ObjectNotFoundError)
    assert parts[0].key in str(gone)
    assert isinstance(changed, ObjectChangedError)
    assert "changed since it was listed" in str(changed)
    assert isinstance(longer, ObjectChangedError)
    assert good == contents[3]


def test_names_are_listed_as_they_are_and_sorted_by_bytes(s3_server):
    """Folder markers and odd names are listed too, and each can be read."""
    storage = s3_server.storage()
    for name in NAMES:
        place = {"Bucket": storage.bucket, "Key": storage.name_of(name)}
        client_of(storage).put_object(**place, Body=name.encode())
    found = list(storage.list_objects(""))
    names = sorted(NAMES, key=str.encode)
    assert [item.key for item in found] == names
    assert [item.etag for item in found] == [
        hashlib.md5(name.encode()).hexdigest() for name in names
    ]
    assert storage.read_many([part_of(item) for item in found]) == [name.encode() for name in names]
    below = ["cat/", "cat/1.jpg", "cat/deep/a.jpg"]
    assert [item.key for item in storage.list_objects("cat/")] == below


def test_a_folder_is_listed_with_links_followed_and_without_loops(tmp_path):
    """The listing follows links as torchvision does, and ends at a link to a parent."""
    (tmp_path / "real" / "cat").mkdir(parents=True)
    (tmp_path / "real" / "cat" / "1.jpg").write_bytes(b"1")
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "cat").symlink_to(tmp_path / "real" / "cat")
    (tmp_path / "root" / "cat" / "up").symlink_to(tmp_path / "root")
    (tmp_path / "root" / "broken").symlink_to(tmp_path / "nowhere")
    found = list(DirectoryStorage(tmp_path / "root").list_objects(""))
    assert [item.key for item in found] == ["cat/1.jpg"]
    assert list(DirectoryStorage(tmp_path / "nothing").list_objects("")) == []
    (outside,) = DirectoryStorage(tmp_path / "root").read_many([ObjectPart("../real/cat/1.jpg", 1)])
    assert "leads out" in str(outside)


# ---- What goes wrong on the way: the right bytes after all, or an error that names the object.


FAULTS = [
    (answer(503, "SlowDown"), "overloaded or down"),
    (cut_in_the_body, "the content broke off"),
    (lose_the_answer, "closed the connection, each time"),
    (truncate, "bytes came, not 5020"),
    (change_a_byte, "MD5 isn't its ETag"),
    (change_the_etag, "changed since it was listed"),
]


@pytest.mark.parametrize(("fault", "words"), FAULTS)
def test_what_passes_is_tried_again_and_what_stays_is_named(over_wire, wire, fault, words):
    """Two failures of three give the right bytes; three give an error with object and endpoint."""
    storage = replace(over_wire, max_attempts=3)
    (part,), contents = fill(storage, 1)
    wire.faults += [("GET", fault)] * 2
    assert storage.read_many([part]) == contents
    # A lost answer on a kept connection is asked for again at once, since servers close those
    # that are idle.
    wire.faults += [("GET", fault)] * 6
    (error,) = storage.read_many([part])
    assert isinstance(error, StorageError)
    assert words in str(error)
    assert "changed" in words or "tried 3 times" in str(error)
    assert f"s3://bucket/{storage.prefix}/{part.key} at {wire.endpoint_url}" in str(error)


def test_each_object_is_one_request(over_wire, wire):
    """There is no HEAD, no listing and no second GET."""
    parts, contents = fill(over_wire)
    before = len(wire.exchanges)
    assert over_wire.read_many(parts) == contents
    assert [exchange.method for exchange in wire.exchanges[before:]] == ["GET"] * len(parts)


def test_reading_again_leaves_the_trainings_generator_alone(over_wire, wire):
    """A retry draws nothing from the generator of the training."""
    parts, contents = fill(over_wire, 2)
    wire.faults += [("GET", cut_in_the_body), ("GET", answer(503, "SlowDown"))]
    ((found, first, is_untouched),) = in_processes([(read_both_ways, over_wire, parts)])
    assert found == contents
    assert first == contents[0]
    assert not wire.faults
    assert is_untouched


def read_both_ways(storage, parts):
    """Read many objects and one; return also whether Python's generator is unchanged."""
    random.seed(7)
    before = random.getstate()
    return storage.read_many(parts), storage.read(parts[0].key), random.getstate() == before


def in_chunks(handler, exchange):
    """Send the right content in another form: without a length."""
    headers = tuple(
        header for header in exchange.answer_headers if header[0].lower() != "content-length"
    )
    handler.send_response_only(exchange.status)
    for name, value in (*headers, ("Transfer-Encoding", "chunked")):
        handler.send_header(name, value)
    handler.end_headers()
    handler.wfile.write(f"{len(exchange.answer):x}\r\n".encode() + exchange.answer)
    handler.wfile.write(b"\r\n0\r\n\r\n")


def test_an_answer_out_of_the_ordinary_is_asked_for_once_more(over_wire, wire):
    """Botocore repeats an unusual request, and all requests to a store that always answers so."""
    (part,), contents = fill(over_wire, 1)
    wire.faults += [("GET", in_chunks)] * 100
    before = wire.count("GET")
    for _ in range(20):
        assert over_wire.read_many([part]) == contents
    assert wire.count("GET") - before <= 20 + NUM_MISSES
    wire.faults.clear()


def test_gets_go_to_the_region_that_the_store_names(over_wire, wire):
    """The lean GETs follow botocore, which follows the store."""
    parts, contents = fill(over_wire, 3)
    elsewhere = answer(400, "AuthorizationHeaderMalformed", "<Region>eu-central-1</Region>")
    wire.faults += [("GET", elsewhere)]
    assert over_wire.read_many(parts[:1]) == contents[:1]
    before = len(wire.exchanges)
    assert over_wire.read_many(parts) == contents
    asked = [exchange.headers["Authorization"] for exchange in wire.exchanges[before:]]
    assert len(asked) == len(parts)
    assert all("/eu-central-1/s3/" in header for header in asked)


# ---- Refusals


@pytest.mark.parametrize("name", ["access_key_id", "session_token"])
def test_credentials_with_a_line_break_are_told_and_not_shown(s3_server, name):
    """The error names the line break, as from a file, and shows no secret."""
    storage = s3_server.storage(**{name: "HUNTER2\n"}, max_attempts=1)
    (error,) = storage.read_many([ObjectPart("some/key", 1)])
    with pytest.raises(StorageError) as read:
        storage.read("some/key")
    for one in (error, read.value):
        assert isinstance(one, StorageError)
        says = "look for spaces and line breaks in the endpoint URL and the credentials"
        assert says in str(one)
        assert "HUNTER2" not in repr(one)


# ---- Forks


def _read_right(storage, parts, contents, seed, num_generations=0):
    """Read at random, here and in a child of this process, and in a child of that."""
    for number in range(5):
        chosen = random.Random(seed + number).choices(range(len(parts)), k=20)
        assert storage.read_many([parts[i] for i in chosen]) == [contents[i] for i in chosen]
    if num_generations:
        again = (storage, parts, contents, seed + 100, num_generations - 1)
        in_processes([(_read_right, *again)])


@pytest.mark.extended
def test_children_of_a_process_that_reads_get_their_own_bytes(open_s3_server):
    """Parent and forked children that read at the same time get no wrong byte and don't hang."""
    storage = open_s3_server.storage()
    parts, contents = fill(storage)
    with ThreadPoolExecutor(1) as pool:
        for seed in range(4):
            reading = pool.submit(_read_right, storage, parts, contents, seed)
            in_processes([(_read_right, storage, parts, contents, 10 * seed, 1)])
            reading.result()
            _read_right(storage, parts, contents, seed)
