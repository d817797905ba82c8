"""Shards are read by the tools that others have: GNU tar, WebDataset."""

import subprocess

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
