"""Reads in any order of use and fork: each returns its own object's bytes, and none hangs."""

import multiprocessing
import os
import random
import signal
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

import pytest

from prefect_torch_ddp.data.lookahead import ReadAhead, ahead_of
from prefect_torch_ddp.storage.protocol import ObjectPart
from prefect_torch_ddp.storage.s3.storage import S3Storage
from tests.support.s3_server import S3Server

pytestmark = pytest.mark.extended

if TYPE_CHECKING:
    from multiprocessing.sharedctypes import Synchronized

NUM_READS = int(os.environ.get("PTD_NUM_READS", "1500"))
NUM_OBJECTS = 200
HANGS_AFTER_S = 90


class Reader:
    """What a process does: reads, alone and in threads and ahead, and forks, in an order that a
    seed draws."""

    def __init__(
        self, storage: S3Storage, parts: Sequence[ObjectPart], num_read: "Synchronized[int]"
    ) -> None:
        self.storage = storage
        self.parts = parts
        self.num_read = num_read
        self.ahead = ReadAhead(self.read)
        self.threads: list[threading.Thread] = []
        self.num_wrong = 0

    def read(self, indices: Sequence[int]) -> bool:
        """Read some objects and compare them; tell whether all were right."""
        values = self.storage.read_many([self.parts[index] for index in indices])
        wrong = sum(value != content(index) for index, value in zip(indices, values, strict=True))
        self.num_wrong += wrong
        with self.num_read.get_lock():
            self.num_read.value += len(indices)
        return not wrong

    def act(self, draw: random.Random, depth: int) -> None:
        """Do one thing."""
        kind = draw.choice(
            ["read", "ahead", "thread", "fork"] if depth < 2 else ["read", "ahead", "thread"]
        )
        chosen, following = (
            draw.choices(range(NUM_OBJECTS), k=draw.randint(1, 24)) for _ in range(2)
        )
        if kind == "read":
            self.read(chosen)
        elif kind == "ahead":
            assert self.ahead.read(ahead_of(chosen, [following]))
        elif kind == "thread":  # which is at it while this one forks
            self.threads.append(threading.Thread(target=self.read, args=(chosen,)))
            self.threads[-1].start()
        else:
            child = os.fork()
            if child == 0:
                in_child(self, draw.random(), depth + 1)
            self.read(chosen)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, (
                "a child read wrong bytes, or hung"
            )

    def run(self, seed: float, depth: int, num_acts: int) -> None:
        """Do so many things."""
        draw = random.Random(seed)
        for _ in range(num_acts):
            self.act(draw, depth)
        for thread in self.threads:
            thread.join()
        assert self.num_wrong == 0


def in_child(reader: Reader, seed: float, depth: int) -> None:
    """Go on in a forked process, with everything that it inherited."""
    signal.alarm(HANGS_AFTER_S)
    status = 1
    try:
        reader.threads, reader.num_wrong = [], 0
        reader.run(seed, depth, num_acts=5)
        status = 0
    finally:
        os._exit(status)


def content(index: int) -> bytes:
    """Return an object's content: no two are alike in any place."""
    return index.to_bytes(2, "big") * 600


@pytest.mark.timeout(900)
def test_no_read_is_wrong_or_hangs(open_s3_server: S3Server) -> None:
    """Processes that read, read ahead, read in threads, fork meanwhile and fork again, until so
    many objects were read."""
    storage = open_s3_server.storage()
    for index in range(NUM_OBJECTS):
        storage.write(f"o/{index:03}", content(index))
    parts = [
        ObjectPart(item.key, item.num_bytes, None, item.etag) for item in storage.list_objects("o/")
    ]
    num_read = multiprocessing.Value("i", 0)
    seed = 0
    while num_read.value < NUM_READS:
        seed += 1
        Reader(storage, parts, num_read).run(seed, depth=0, num_acts=5)
    assert num_read.value >= NUM_READS
