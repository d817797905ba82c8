"""The storage in a folder passes the conformance suite and the tests of file systems."""

import itertools
import mmap
import os
import random
import resource
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from prefect_torch_ddp.errors import BadKeyError, ObjectNotFoundError, StorageError
from prefect_torch_ddp.storage.directory import UNCACHED_BYTES, DirectoryStorage
from tests.support.storage_conformance import StorageConformance, in_processes

NOBODY = 65534


class TestDirectoryStorage(StorageConformance):
    """Everything a storage must do."""

    @pytest.fixture
    def make_storage(self, tmp_path):
        """Make storages in separate folders, which don't exist yet."""
        numbers = itertools.count()
        return lambda: DirectoryStorage(tmp_path / f"storage-{next(numbers)}")


@pytest.fixture
def storage(tmp_path):
    """Give a storage in an empty folder."""
    return DirectoryStorage(tmp_path / "storage")


def test_unfinished_files_never_show_and_are_swept_a_day_later(storage):
    """Files of a killed writer are invisible, and the probe removes them once nobody can use
    them. A file of another name isn't ours, though it is older."""
    storage.write("a", b"1")
    assert storage.write_if_absent("a", b"2") is False
    assert list((storage.root / ".tmp").iterdir()) == []
    names = ("0" * 32, "1" * 32, "thesis.txt")
    old, young, of_others = (storage.root / ".tmp" / name for name in names)
    two_days_ago = time.time() - 48 * 3600
    for path in (old, young, of_others):
        path.write_bytes(b"half")
        if path != young:
            os.utime(path, (two_days_ago, two_days_ago))
    assert [found.key for found in storage.list()] == ["a"]
    with pytest.raises(BadKeyError):
        storage.read(f".tmp/{young.name}")
    storage.check_writable()
    assert set((storage.root / ".tmp").iterdir()) == {young, of_others}


def test_deleting_prunes_empty_folders_up_to_the_root(storage):
    """Empty folders are removed, and a folder with a neighbour stays."""
    storage.write("a/b/c/object", b"1")
    storage.write("a/neighbour", b"1")
    storage.delete("a/b/c/object")
    assert not (storage.root / "a" / "b").exists()
    storage.delete("a/neighbour")
    assert not (storage.root / "a").exists()
    assert storage.root.exists()


def test_writes_survive_deletes_of_neighbours(storage):
    """A write succeeds even if a delete removes its empty folder between mkdir and the move."""

    def churn(name):
        for _ in range(600):
            storage.write(f"a/b/c/{name}", b"1")
            storage.delete(f"a/b/c/{name}")

    in_processes([(churn, "one"), (churn, "two")])
    assert list(storage.list()) == []


def test_files_are_readable_as_the_umask_says(storage):
    """Files in a shared folder aren't private to their writer."""
    before = os.umask(0o022)
    try:
        storage.write("a", b"1")
        storage.write_if_absent("b", b"1")
    finally:
        os.umask(before)
    assert [(storage.root / key).stat().st_mode & 0o777 for key in "ab"] == [0o644, 0o644]


def test_links_do_not_lead_out(storage, tmp_path):
    """No linked folder or file reads, writes, deletes or lists anything outside the root."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text("secret")
    storage.write("object", b"1")
    (storage.root / "folder").symlink_to(outside)
    (storage.root / "file").symlink_to(outside / "secret")
    for attempt in (
        lambda: storage.read("folder/secret"),
        lambda: storage.read("file"),
        lambda: storage.write("folder/new", b"x"),
        lambda: storage.write_if_absent("folder/new", b"x"),
        lambda: storage.delete("folder/secret"),
    ):
        with pytest.raises(BadKeyError, match="leads out"):
            attempt()
    storage.write("file", b"replaces the link, not its target")
    assert {path.name: path.read_text() for path in outside.iterdir()} == {"secret": "secret"}
    assert [found.key for found in storage.list()] == ["file", "object"]


def test_a_name_is_a_file_or_a_folder(storage):
    """One key can't be the beginning of another: the message says so."""
    storage.write("a", b"1")
    with pytest.raises(StorageError, match="a file stands where a folder is needed"):
        storage.write("a/b", b"2")
    storage.write("c/d", b"1")
    for write in (storage.write, storage.write_if_absent):
        with pytest.raises(StorageError, match="a folder stands where the file is needed"):
            write("c", b"2")
    with pytest.raises(ObjectNotFoundError):
        storage.read("c")


def _without_rights(storage, operation, *arguments):
    if os.geteuid() == 0:
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    return getattr(storage, operation)(*arguments)


def test_the_folder_that_lacks_rights_is_named():
    """What is written is first a file in .tmp, which is another user's in a shared directory."""
    with TemporaryDirectory() as folder:  # tmp_path is in a folder that only its user may enter
        Path(folder).chmod(0o755)
        storage = DirectoryStorage(Path(folder) / "shared")
        storage.write("kept", b"1")
        storage.root.chmod(0o777)
        (storage.root / ".tmp").chmod(0o555)
        with pytest.raises(StorageError, match=rf"{storage.root}/\.tmp has dr-xr-xr-x, user "):
            in_processes([(_without_rights, storage, "write", "new", b"1")])


@pytest.mark.parametrize(
    ("operation", "arguments"),
    [("check_writable", ()), ("write", ("a", b"1")), ("read", ("kept",)), ("delete", ("kept",))],
)
def test_missing_rights_are_named(storage, tmp_path, operation, arguments):
    """The error has the path, the reason and the way out, also after a pickle."""
    storage.write("kept", b"1")
    tmp_path.chmod(0o755)
    storage.root.chmod(0)
    try:
        says = r"storage.*Permission denied; give this user the right"
        with pytest.raises(StorageError, match=says):
            in_processes([(_without_rights, storage, operation, *arguments)])
    finally:
        storage.root.chmod(0o755)


def _with_small_files(storage):
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
    storage.write("big", b"x" * 20_000)


def test_a_write_that_does_not_fit_leaves_the_old_content(storage):
    """A write that fails half-way says so, changes nothing and leaves no temporary file."""
    storage.write("big", b"old")
    with pytest.raises(StorageError, match=r"big: File too large; .*ulimit"):
        in_processes([(_with_small_files, storage)])
    assert storage.read("big") == b"old"
    assert list((storage.root / ".tmp").iterdir()) == []


def test_a_full_disk_is_named(tmp_path):
    """The error says which path has no space left, and what to do."""
    disk = tmp_path / "disk"
    disk.mkdir()
    unshare = ["unshare", "--mount"]
    unshare += [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    # A disk of its own, seen only by the child.
    mount = f"mount -t tmpfs -o size=256k none {disk} || exit 77; exec {sys.executable} -c "
    code = (
        "from pathlib import Path; from prefect_torch_ddp import DirectoryStorage;"
        f"storage = DirectoryStorage(Path({str(disk)!r})); storage.write('small', b'1'); "
        "storage.write('big', b'x' * 2**20)"
    )
    command = [*unshare, "sh", "-c", mount + shlex.quote(code)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip("this system lets no test mount a file system")
    says = f"can't write {disk}/big: No space left on device; the disk is full: free space there"
    assert says in done.stderr


@pytest.mark.parametrize("folder", ["on the disk", "in memory"])
@pytest.mark.parametrize("begins_at", [0, 16])
def test_a_large_object_is_written_past_the_page_cache(tmp_path, folder, begins_at):
    """Its bytes are right for any alignment, and the kernel caches at most the last page."""
    content = random.Random(1).randbytes(UNCACHED_BYTES + 4321)
    memory = mmap.mmap(-1, begins_at + len(content))
    memory[begins_at:] = content
    data = memoryview(memory)[begins_at:]
    with tempfile.TemporaryDirectory(dir="/dev/shm") as other:
        storage = DirectoryStorage(Path(other if folder == "in memory" else tmp_path))
        for num_bytes in (UNCACHED_BYTES - 1, UNCACHED_BYTES, len(data)):
            storage.write("large", data[:num_bytes])
            assert storage.read("large") == content[:num_bytes]
        storage.write("large", data)
        path = storage.root / "large"
        kind = subprocess.run(["stat", "-fc%T", path], check=True, capture_output=True, text=True)
        if kind.stdout.strip() != "tmpfs" and begins_at == 0:
            # The second one's words: overlayfs and others can't say.
            says = "temporarily unavailable|not supported"
            with path.open("rb") as file, pytest.raises(OSError, match=says):
                os.preadv(file.fileno(), [bytearray(1)], 0, os.RWF_NOWAIT)


def test_foreign_files_are_not_listed(storage):
    """A file whose name is no key can't be read and isn't listed."""
    storage.write("good", b"1")
    (storage.root / "bad\nname").write_text("")
    (storage.root / "back\\slash").write_text("")
    (storage.root / os.fsdecode(b"not-utf8-\xff")).write_text("")
    assert [found.key for found in storage.list()] == ["good"]
