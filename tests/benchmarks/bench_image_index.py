"""How long it takes to sort out what was listed of an image folder, and what it takes of
memory: for a simulated listing."""

from pathlib import Path

import pytest

from tests.benchmarks.beside import in_fresh_processes, rounds, show

pytestmark = pytest.mark.timeout(900)
ROUNDS = rounds(5)
CODE = r"""
from prefect_torch_ddp.data import write_index
from prefect_torch_ddp.data.images.listing import index_images
from prefect_torch_ddp.data.images.listing import read_index
from prefect_torch_ddp.storage.protocol import ListedObject

class Simulated:
    uri = "s3://bucket/images"
    def __init__(self, num):
        self.num = num
    def read_many(self, parts):
        raise NotImplementedError
    def list_objects(self, prefix):
        each = -(-self.num // 100)
        for i in range(self.num):
            name = f"n{i // each:08d}/ILSVRC2012_{i:012d}.jpg"
            yield ListedObject(name, 100_000 + i, f"{i * 2654435761 % 2**128:032x}")

what, num, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
source = Simulated(num)
if what == "only the listing":
    work = lambda: sum(1 for _ in source.list_objects(""))
elif what == "sorted out into classes":
    work = lambda: len(index_images(source.list_objects(""), source.uri).targets)
elif what == "written to a file by prepare":
    work = lambda: write_index(source, folder)
else:
    write_index(source, folder)
    work = lambda: len(index_images(read_index(folder, source.uri), source.uri).targets)
begin_the_peak_anew()
before, began = memory_mb(), time.perf_counter()
kept = work()
print(time.perf_counter() - began, memory_mb() - before)
"""
WAYS = (
    "only the listing",
    "sorted out into classes",
    "written to a file by prepare",
    "read from that file, sorted out",
)


@pytest.mark.parametrize("num", [20_000, 1_000_000])
def test_index(num: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Print seconds and the peak of memory beyond what was there before, each in a fresh
    process."""
    rows = []
    for way in WAYS:
        seconds, megabytes = in_fresh_processes(CODE, way, str(num), str(tmp_path), num=ROUNDS)
        rows.append((f"{num} objects: {way}", f"{seconds:.2f}", f"{megabytes:.0f}"))
    show(capsys, ("what", "s", "peak of memory MB"), rows)
