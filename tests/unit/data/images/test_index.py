"""Which objects are images of which class, and the index that ranks read instead of listing:
pure, and on a local disk."""

import gzip
import pickle
import threading
import tracemalloc
from itertools import repeat

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torchvision.datasets import ImageFolder
from torchvision.datasets.folder import IMG_EXTENSIONS

from prefect_torch_ddp.data.images.listing import (
    EXTENSIONS,
    INDEX_NAME,
    NUM_AHEAD,
    NUM_FOLDERS,
    digest_of_listing,
    index_images,
    list_dataset,
    read_index,
    write_index,
)
from prefect_torch_ddp.errors import InvalidParamsError, NoImagesError
from prefect_torch_ddp.storage.directory import DirectoryStorage
from prefect_torch_ddp.storage.protocol import ListedObject, Readable
from tests.integration.data.image_files import write_folder

PARTS = st.sampled_from(["a", "b", "a-b", "a.b", "B", "ä", "1.jpg", "2.PNG", "notes.txt", "x.webp"])


def listed(*keys):
    """Make a listing of these names."""
    return [ListedObject(key, len(key), f"etag of {key}") for key in sorted(keys, key=str.encode)]


@settings(max_examples=60, deadline=None)
@given(st.sets(st.lists(PARTS, min_size=1, max_size=4).map(tuple), min_size=1, max_size=12))
def test_classes_samples_and_order_are_torchvisions(tmp_path_factory, names):
    """For any tree of files: the same classes, the same numbers, the same images in the same
    order, the same refusals."""
    root = tmp_path_factory.mktemp("tree")
    files = {"/".join(parts) for parts in names}
    files = {name for name in files if not any(other.startswith(f"{name}/") for other in files)}
    write_folder(root, dict.fromkeys(files, b""))
    objects = list(DirectoryStorage(root).list_objects(""))
    try:
        theirs = ImageFolder(str(root))
    except FileNotFoundError:
        with pytest.raises(NoImagesError):
            index_images(objects, "here")
        return
    ours = index_images(objects, "here")
    assert EXTENSIONS == IMG_EXTENSIONS
    assert ours.classes == theirs.classes
    assert [f"{root}/{item.key}" for item in ours.objects] == [path for path, _ in theirs.samples]
    assert ours.targets.tolist() == theirs.targets


def test_a_folder_marker_makes_a_class_and_no_image():
    """A class of which only the marker is there is empty, and named."""
    names = ("cat/", "cat/1.jpg", "dog/", "dog/2.jpg", "readme.txt", "3.jpg")
    found = index_images(listed(*names), "here")
    assert found.classes == ["cat", "dog"]
    assert [item.key for item in found.objects] == ["cat/1.jpg", "dog/2.jpg"]
    with pytest.raises(NoImagesError, match=r"classes cow, dog in s3://b/p.*allow_empty.*\.jpg"):
        index_images(listed("cat/1.jpg", "cow/", "dog/notes.txt"), "s3://b/p")
    allowed = index_images(listed("cat/1.jpg", "dog/"), "here", allow_empty=True)
    assert allowed.classes == ["cat", "dog"]


@pytest.mark.parametrize(
    ("keys", "words"),
    [((), "nothing"), (("1.jpg", "notes.txt"), "2 objects, none of them in a folder")],
)
def test_no_class_folder_says_what_there_is(keys, words):
    """As a FileNotFoundError, as torchvision does."""
    with pytest.raises(FileNotFoundError, match=f"any class folder in s3://b/p: there is {words}"):
        index_images(listed(*keys), "s3://b/p")


class Listed(Readable):
    """A source of which only the listing counts."""

    uri = "s3://bucket/data"

    def __init__(self, keys):
        self.keys = keys

    def read_many(self, parts):
        raise NotImplementedError

    def list_objects(self, prefix):
        """Make the objects as they are asked for."""
        return (
            ListedObject(key, 35_000, f"{hash(key) & 2**64 - 1:032x}")
            for key in self.keys()
            if key.startswith(prefix)
        )


def test_the_digest_of_a_listing_changes_with_every_object(tmp_path):
    """Content, size, name, presence."""
    storage = DirectoryStorage(tmp_path)
    seen = {digest_of_listing(storage)}
    for key, content in [("a/1", b"x"), ("a/2", b"x"), ("a/1", b"yy"), ("a/1", b"zz")]:
        storage.write(key, content)
        seen.add(digest_of_listing(storage))
    storage.delete("a/2")
    seen.add(digest_of_listing(storage))
    assert len(seen) == 6
    assert digest_of_listing(storage) in seen


def test_an_index_gives_the_listing_back_also_for_a_folder_of_it(tmp_path):
    """Keys are relative to the place that is asked for."""
    names = [f"c{c}/{i}.jpg" for c in range(3) for i in range(900)]
    source = Listed(lambda: [f"{part}/{n}" for part in ("train", "train2", "val") for n in names])
    assert write_index(source, tmp_path) == 8100
    assert list(read_index(tmp_path, "s3://bucket/data/")) == list(source.list_objects(""))
    below = list(read_index(tmp_path / INDEX_NAME, "s3://bucket/data/train"))
    assert [item.key for item in below] == names


def test_an_index_in_the_home_folder_is_written_and_read_there(tmp_path, monkeypatch):
    """It was refused: there is no folder `~`."""
    monkeypatch.setenv("HOME", str(tmp_path))
    source = DirectoryStorage(tmp_path / "images")
    source.write("a/1.jpg", b"1")
    (tmp_path / "index").mkdir()
    assert write_index(source, "~/index") == 1
    assert (tmp_path / "index" / INDEX_NAME).is_file()
    assert [item.key for item in read_index("~/index", source.uri)] == ["a/1.jpg"]


def test_an_index_that_does_not_fit_is_refused(tmp_path):
    """None, another dataset's, damaged, cut off, of another kind."""
    with pytest.raises(InvalidParamsError, match=r"there is no index .* write it by write_index"):
        read_index(tmp_path, "s3://bucket/data")
    write_index(Listed(lambda: ["a/1.jpg", "b/2.jpg"]), tmp_path)
    for uri in ("s3://bucket/data2", "s3://bucket", "/data"):
        with pytest.raises(InvalidParamsError, match="lists s3://bucket/data, and the dataset is"):
            list(read_index(tmp_path, uri))
    path = tmp_path / INDEX_NAME
    whole = path.read_bytes()
    lines = gzip.decompress(whole).splitlines(keepends=True)
    for broken in (
        whole[:-9],
        whole[:-20] + b"!!!" + whole[-17:],
        gzip.compress(b"".join(lines[:-1])),
        b"no index at all",
    ):
        path.write_bytes(broken)
        with pytest.raises(InvalidParamsError, match="run prepare again"):
            list(read_index(tmp_path, "s3://bucket/data"))


class Folders(Listed):
    """Folders with so many objects each, and objects next to them; counts what it lists. The
    first two folders wait for one another."""

    def __init__(self, num_folders, num_each, num_beside):
        self.nums = num_folders, num_each, num_beside
        self.num_begun = self.num_listed = 0
        self.both = threading.Barrier(2)

    def list_level(self, prefix):
        num_folders, _, num_beside = self.nums
        beside = [f"{'az'[i % 2]}{i:07}.jpg" for i in range(num_beside)]
        names = sorted([*beside, *(f"c{c:02}/" for c in range(num_folders))])
        yield from (n if n.endswith("/") else ListedObject(n, 35_000, "") for n in names)

    def list_objects(self, prefix):
        """Make a folder's objects as they are asked for."""
        self.num_begun += 1
        return map(self._make, repeat(prefix), range(self.nums[1]))

    def _make(self, prefix, number):
        if number == 0 and prefix in {"c00/", "c01/"}:
            self.both.wait(60)
        self.num_listed += 1
        return ListedObject(f"{prefix}{number:07}.jpg", 35_000, f"{number:032x}")


def test_an_index_of_many_objects_takes_no_more_memory(tmp_path):
    """Listing, writing and reading hold only a few of many folders in memory."""
    source = Folders(100, 400, 400)
    tracemalloc.start()
    assert write_index(source, tmp_path) == 40_400
    assert sum(1 for _ in read_index(tmp_path, source.uri)) == 40_400
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 6 * 2**20


@pytest.mark.parametrize("nums", [(100, 1, 1), (2, 3 * NUM_AHEAD, 0), (30, 50, 2)])
def test_folders_are_listed_side_by_side_and_a_little_ahead(nums):
    """Parallel listing keeps the order, and begins only a few folders and pages ahead."""
    others = set(threading.enumerate())
    whole = [item.key for item in list_dataset(Folders(*nums))]
    assert whole == sorted(set(whole))
    assert len(whole) == nums[0] * nums[1] + nums[2]
    source = Folders(*nums)
    listing = list_dataset(source)
    assert [next(listing).key, next(listing).key] == whole[:2]
    listing.close()
    for thread in set(threading.enumerate()) - others:
        thread.join()
    assert source.num_begun <= NUM_FOLDERS + 1
    assert source.num_listed <= 3 * NUM_AHEAD


def test_an_index_in_memory_takes_its_texts_and_little_more():
    """One long name costs its own length and no other's; it is pickled as small, and the same
    afterwards."""
    keys = [f"c{i % 50:02}/{i:07}.jpg" for i in range(20_000)]
    keys.append(f"c01/{'x' * 2000}.jpg")
    etag = "0" * 32
    tracemalloc.start()
    index = index_images((ListedObject(key, 35_000, etag) for key in keys), "here")
    kept, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 100 * len(keys)
    assert peak < 250 * len(keys)
    sent = pickle.dumps(index)
    assert len(sent) < 100 * len(keys)
    assert [item.key for item in pickle.loads(sent).objects] == sorted(keys)
    assert index.objects[-1] == ListedObject(max(keys), 35_000, etag)
