"""What every storage must do: one suite, run against each of them."""

import gc
import multiprocessing
import pickle
from collections.abc import Callable
from multiprocessing.synchronize import Barrier
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prefect_torch_ddp.errors import BadKeyError, ObjectNotFoundError
from prefect_torch_ddp.storage.protocol import Storage, StoredObject
from tests.support.waiting import HANG_S

NUM_RACERS = 8
FORK = multiprocessing.get_context("fork")

ESCAPES = [
    *("/etc/passwd", "../outside", "a/../../outside", "a/..", "./a", "a/./b", "a//b", "a/", ""),
    *("C:/windows", "a\\b", "a\0b", "a\nb", ".tmp/x", "k" * 256, "/".join(["k" * 100] * 10)),
]

# No key is the folder of another one: in a directory the two exclude each other.
KEYS = st.sampled_from(
    [
        *("a.x", "a/b.x", "a/b/c.x", "a/é ü.x", "a0.x", "a-.x", "train/1.x", "train2/1.x"),
        *("Ω/😀.x", "z/.x", "% &+?.x"),
    ]
)
PREFIXES = st.sampled_from(["", "a", "a/", "a/b", "a/b/", "train", "train/", "Ω", "no", "z/."])
CONTENTS = st.binary(max_size=64)
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["write", "write_if_absent"]), KEYS, CONTENTS),
        st.tuples(st.sampled_from(["read", "delete"]), KEYS),
        st.tuples(st.just("list"), PREFIXES),
    ),
    max_size=12,
)


class StorageConformance:
    """The suite.

    A subclass gives the fixture `make_storage`, which returns an empty storage each time it is
    called.
    """

    num_examples = 60
    num_races = 5

    @pytest.fixture
    def storage(self, make_storage: Callable[[], Storage]) -> Storage:
        return make_storage()

    def test_reads_what_was_written(self, storage):
        """Bytes come back as they were, also none at all and megabytes, and those of a view."""
        for data in (b"", b"\0\xff\r\n", bytes(range(256)) * 20_000):
            for content in (data, memoryview(bytearray(b"x" + data))[1:].toreadonly()):
                storage.write("folder/object", content)
                assert storage.read("folder/object") == data

    def test_an_absent_object_is_named(self, storage):
        """Reading what isn't there says which key and where."""
        storage.write("folder/object", b"")
        for key in ("absent", "folder", "folder/absent", "folder/object/below"):
            with pytest.raises(ObjectNotFoundError, match=key):
                storage.read(key)

    def test_deleting_twice_is_no_error(self, storage):
        """A deleted object is gone, its neighbour stays, and an absent one may be deleted."""
        storage.write("folder/one", b"1")
        storage.write("folder/two", b"2")
        storage.delete("folder/one")
        storage.delete("folder/one")
        storage.delete("folder")
        with pytest.raises(ObjectNotFoundError):
            storage.read("folder/one")
        assert storage.read("folder/two") == b"2"

    def test_lists_by_string_prefix_in_key_order(self, storage):
        """A prefix is text, not a folder; the order is that of the keys, not of folders; sizes
        are right."""
        for key in ("train2/x", "train/b", "train/a/deep", "train-x", "test/x"):
            storage.write(key, key.encode())
        found = list(storage.list("train"))
        assert found == [
            StoredObject(key, len(key))
            for key in ("train-x", "train/a/deep", "train/b", "train2/x")
        ]
        assert [entry.key for entry in storage.list("train/")] == ["train/a/deep", "train/b"]
        assert len(list(storage.list())) == 5
        assert list(storage.list("absent/")) == []

    @pytest.mark.parametrize("key", ESCAPES)
    def test_bad_keys_are_refused_everywhere(self, storage, key):
        """Each operation refuses a key that leaves the root or isn't portable, a listing such a
        prefix; nothing is written."""
        for operation in (
            lambda: storage.read(key),
            lambda: storage.write(key, b"x"),
            lambda: storage.write_if_absent(key, b"x"),
            lambda: storage.delete(key),
        ):
            with pytest.raises(BadKeyError):
                operation()
        for prefix in ("/", "../", "a/../", "C:", "a\\"):
            with pytest.raises(BadKeyError):
                list(storage.list(prefix))
        assert list(storage.list()) == []

    def test_write_if_absent_keeps_the_first(self, storage):
        """The second writer learns that it lost and changes nothing; after a delete the key
        is free again."""
        assert storage.write_if_absent("claim", b"first") is True
        assert storage.write_if_absent("claim", b"second") is False
        assert storage.read("claim") == b"first"
        storage.delete("claim")
        assert storage.write_if_absent("claim", b"third") is True
        assert storage.read("claim") == b"third"

    def test_one_of_racing_processes_wins(self, storage):
        """Exactly one of eight racing writers of a key learns that it won, and its content
        is complete."""
        barrier = FORK.Barrier(NUM_RACERS)
        contents = [bytes([racer]) * 300_000 for racer in range(NUM_RACERS)]
        for number in range(self.num_races):
            key = f"race/{number}"
            won = in_processes([(_race, storage, key, data, barrier) for data in contents])
            assert sorted(won) == [False] * (NUM_RACERS - 1) + [True]
            assert storage.read(key) == contents[won.index(True)]

    def test_readers_never_see_a_part(self, storage):
        """While an object is overwritten a reader finds the one content or the other."""
        storage.write("hot", b"a" * 500_000)
        barrier = FORK.Barrier(2)
        kinds, _ = in_processes([(_watch, storage, barrier), (_overwrite, storage, barrier)])
        assert kinds <= {b"a" * 500_000, b"b" * 300_000}

    def test_it_is_a_description_that_pickles(self, storage):
        """A copy that went through pickle, after use, is equal and sees the same objects."""
        assert isinstance(storage, Storage)
        storage.write("object", b"content")
        copy = pickle.loads(pickle.dumps(storage))
        assert copy == storage
        assert copy.uri == storage.uri
        assert copy.read("object") == b"content"

    def test_forked_children_read_their_own_bytes(self, storage):
        """A storage that was used before a fork gives each child, and the parent, the bytes of
        the key it asked for."""
        keys = [f"object/{number}" for number in range(4)]
        for key in keys:
            storage.write(key, key.encode() * 3000)
        assert storage.read(keys[0]) == keys[0].encode() * 3000
        barrier = FORK.Barrier(len(keys))
        assert in_processes(
            [(_read_often, storage, key, key.encode() * 3000, barrier) for key in keys]
        ) == [0] * len(keys)
        assert storage.read(keys[1]) == keys[1].encode() * 3000

    def test_the_probe_passes_and_leaves_nothing(self, storage):
        """A storage that works is found writable, and is empty afterwards."""
        storage.check_writable()
        assert list(storage.list()) == []

    def test_it_behaves_like_a_dictionary(self, make_storage):
        """Whatever the order of calls, the answers are those of a dict."""

        @settings(
            max_examples=self.num_examples,
            deadline=None,
            derandomize=True,
            suppress_health_check=[HealthCheck.too_slow],
            database=None,
        )
        @given(operations=OPERATIONS)
        def compare(operations):
            storage, model = make_storage(), {}
            for operation in operations:
                assert _apply(storage, operation) == _apply_to_model(model, operation), operation
            assert [(found.key, found.num_bytes) for found in storage.list()] == [
                (key, len(model[key])) for key in sorted(model)
            ]

        compare()


def _apply(storage: Storage, operation: tuple[Any, ...]) -> Any:
    name, *arguments = operation
    try:
        result = getattr(storage, name)(*arguments)
    except ObjectNotFoundError:
        return "absent"
    return [found.key for found in result] if name == "list" else result


def _apply_to_model(model: dict[str, bytes], operation: tuple[Any, ...]) -> Any:
    name, key, *data = operation
    if name == "read":
        return model.get(key, "absent")
    if name == "list":
        return sorted(found for found in model if found.startswith(key))
    if name == "delete":
        model.pop(key, None)
    elif name == "write" or key not in model:
        model[key] = data[0]
        return True if name == "write_if_absent" else None
    else:
        return False
    return None


def in_processes(calls: list[tuple[Any, ...]]) -> list[Any]:
    """Run (function, *arguments) in forked processes at once; return their results, in
    order."""
    pipes = [FORK.Pipe(duplex=False) for _ in calls]
    children = [
        FORK.Process(target=_send_result, args=(sender, *call))
        for (_, sender), call in zip(pipes, calls, strict=True)
    ]
    gc.freeze()  # else each child, as it collects, copies all that this process has
    try:
        for child in children:
            child.start()
        results = []
        for receiver, _ in pipes:
            assert receiver.poll(HANG_S), "a process did not answer"
            results.append(receiver.recv())
    finally:
        gc.unfreeze()
        for child, (receiver, sender) in zip(children, pipes, strict=True):
            child.join(HANG_S if len(results) == len(calls) else 0)
            child.kill()
            child.join()
            child.close()
            receiver.close()
            sender.close()
    failures = [result for result in results if isinstance(result, BaseException)]
    if failures:
        raise failures[0]
    return results


def _send_result(sender: Any, function: Callable[..., Any], *arguments: Any) -> None:
    try:
        sender.send(function(*arguments))
    except BaseException as error:  # noqa: BLE001 - told by the parent
        sender.send(error)


def _race(storage: Storage, key: str, data: bytes, barrier: Barrier) -> bool:
    barrier.wait(HANG_S)
    return storage.write_if_absent(key, data)


def _watch(storage: Storage, barrier: Barrier) -> set[bytes]:
    barrier.wait(HANG_S)
    seen = set()
    while not any(True for _ in storage.list("overwritten")):
        seen.add(storage.read("hot"))
    return seen


def _overwrite(storage: Storage, barrier: Barrier) -> None:
    barrier.wait(HANG_S)
    for number in range(20):
        storage.write("hot", b"b" * 300_000 if number % 2 == 0 else b"a" * 500_000)
    storage.write("overwritten", b"")


def _read_often(storage: Storage, key: str, expected: bytes, barrier: Barrier) -> int:
    barrier.wait(HANG_S)
    return sum(storage.read(key) != expected for _ in range(50))
