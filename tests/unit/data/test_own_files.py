"""Files that a loader's forked worker opens again, in a process that reads in threads too."""

import os
from pathlib import Path

import pytest

from prefect_torch_ddp.data.own_files import OwnFiles


@pytest.mark.parametrize("becomes", ["a pipe", "another file", "nothing", "itself"])
def test_what_a_thread_closed_before_the_fork_is_left_alone(becomes, tmp_path: Path) -> None:
    """Its number may belong to a pipe or another file by then, whose place stays as it is."""
    (tmp_path / "one").write_bytes(b"0123456789")
    (tmp_path / "two").write_bytes(b"abcdefghij")
    fd = os.open(tmp_path / "one", os.O_RDONLY)
    os.lseek(fd, 4, os.SEEK_SET)
    files = OwnFiles(None)
    files.note()
    ends = os.pipe()
    other = os.open(tmp_path / "two", os.O_RDONLY)
    os.lseek(other, 2, os.SEEK_SET)
    try:
        if becomes == "a pipe":
            os.dup2(ends[0], fd)
            os.write(ends[1], b"ok")
        elif becomes == "another file":
            os.dup2(other, fd)
        elif becomes == "nothing":
            os.close(fd)
        else:
            os.lseek(fd, 7, os.SEEK_SET)  # as another worker does, that shares the place
        files(0)
        if becomes == "nothing":
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.fstat(fd)
        else:
            expected = {"a pipe": b"ok", "another file": b"cd", "itself": b"45"}[becomes]
            assert os.read(fd, 2) == expected
    finally:
        for each in {*ends, other, *([] if becomes == "nothing" else [fd])}:
            os.close(each)
