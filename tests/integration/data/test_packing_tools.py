"""Shards are read by the tools that others have: GNU tar, WebDataset."""

import hashlib
import os
import subprocess
import sys

import pytest

from prefect_torch_ddp.data.images.tar_shards import pack_shards
from tests.unit.data.images.test_tar_shards import make_folder, some_files


def test_gnu_tar_reads_them(tmp_path):
    """The command lists and unpacks a shard without a complaint."""
    pack_shards(make_folder(tmp_path / "in", some_files(9)), tmp_path / "out")
    (tmp_path / "unpacked").mkdir()
    done = subprocess.run(
        ["tar", "-xvf", tmp_path / "out/shard-000000.tar", "-C", tmp_path / "unpacked"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert not done.stderr
    assert done.stdout.split()[:4] == [
        "000000000.jpg",
        "000000000.cls",
        "000000001.jpg",
        "000000001.cls",
    ]
    assert len(list((tmp_path / "unpacked").iterdir())) == 18


WEBDATASET = """
import sys, webdataset, hashlib
shards = "file:" + sys.argv[1] + "/shard-{000000..%s}.tar" % sys.argv[2]
samples = webdataset.WebDataset(shards, shardshuffle=False, empty_check=False)
for sample in samples.to_tuple("jpg", "cls"):
    print(hashlib.sha256(sample[0]).hexdigest(), int(sample[1]))
"""


def test_webdataset_reads_them(tmp_path):
    """WebDataset (in PTD_WEBDATASET_PYTHON's environment, or in this one) gets every sample
    with its label."""
    python = os.environ.get("PTD_WEBDATASET_PYTHON", sys.executable)
    if subprocess.run(
        [python, "-c", "import webdataset"], capture_output=True, check=False, timeout=100
    ).returncode:
        pytest.skip("webdataset isn't installed; PTD_WEBDATASET_PYTHON names a Python that has it")
    files = some_files()
    pack_shards(make_folder(tmp_path / "in", files), tmp_path / "out", shard_bytes=50_000)
    last = max((tmp_path / "out").glob("*.tar")).stem.removeprefix("shard-")
    done = subprocess.run(
        [python, "-c", WEBDATASET, tmp_path / "out", last],
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )
    labels = {"cat": 0, "dog": 1, "eel": 2}
    assert sorted(done.stdout.splitlines()) == sorted(
        f"{hashlib.sha256(data).hexdigest()} {labels[key[:3]]}" for key, data in files.items()
    )
