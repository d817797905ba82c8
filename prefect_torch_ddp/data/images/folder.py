"""Images in folders, anywhere: torchvision's `ImageFolder`, and the same for buckets."""

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from io import BytesIO
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, Literal

from PIL import Image
from torchvision.datasets import ImageFolder, VisionDataset
from torchvision.datasets.folder import default_loader

from prefect_torch_ddp.data.fetching import HasLayout
from prefect_torch_ddp.data.images.listing import EXTENSIONS, index_images, list_dataset, read_index
from prefect_torch_ddp.data.images.location import Location, readable_at, through_cache
from prefect_torch_ddp.data.lookahead import ReadAhead
from prefect_torch_ddp.errors import (
    CorruptImageError,
    InvalidParamsError,
    ObjectChangedError,
    ObjectNotFoundError,
    StorageError,
)
from prefect_torch_ddp.lazy import exported_by
from prefect_torch_ddp.storage.names import RESERVED_FOLDER
from prefect_torch_ddp.storage.protocol import Contents, ListedObject, ObjectPart, Readable

logger = logging.getLogger(__name__)

OnError = Literal["raise", "skip"]
_FAULTS_OF_AN_IMAGE = (CorruptImageError, ObjectNotFoundError, ObjectChangedError)
"""What may be skipped; that a storage can't be reached, or refuses, is no fault of one image."""


def pil_loader(file: BinaryIO) -> Image.Image:
    """Decode an image as torchvision does: RGB, whatever it was."""
    return Image.open(file).convert("RGB")


@exported_by("prefect_torch_ddp.data")
class S3ImageFolder(VisionDataset):  # type: ignore[misc]  # torchvision has no types
    """Images in folders of a bucket, named `<class>/<name>.jpg`, as torchvision's `ImageFolder`.

    All images of a batch are read concurrently, over up to 32 connections, while the previous batch
    is used. `ctx.loader` does that; with your own DataLoader use `data.LookAhead`. Each object is
    one request. It is retried by the storage's rules and compared with the listing. You may use the
    dataset before and after a fork, and send it to other processes. It also reads local folders.

    Args:
        uri: `s3://bucket/prefix`, a folder, or a storage; with `storage`, a path in that storage.
        transform: applied to each decoded image.
        target_transform: applied to each class number.
        storage: the storage to read from, with its credentials. None: AWS's default chain of
            credentials is used.
        anonymous: don't sign requests, as for public data.
        endpoint_url: URL of a store other than AWS.
        region: region of the bucket.
        cache: folder on a local disk that keeps objects that were read, up to 50 GiB. For another
            limit, pass a `CachedReads` as uri.
        index: folder to which `write_index` wrote; then nothing is listed.
        on_error: what to do about a corrupt, missing or changed image. "raise": raise an error that
            names it. "skip": leave it out of its batch, which is then smaller, with a warning that
            counts such images.
        loader: decodes an image. It gets an open binary file; torchvision's gets a path.
        is_valid_file: returns for a key whether it is an image. None: decided by the extension.
        allow_empty: whether a class may have no image.

    Raises:
        InvalidParamsError: the arguments contradict each other, or the index belongs to another
            dataset.
        NoImagesError: there is no class folder, or a class has no images.
        StorageError: the images can't be listed.

    Example:
        In `train`, with a `transform` that gives tensors:

            from prefect_torch_ddp.data import S3ImageFolder

            images = S3ImageFolder("s3://bucket/images/train", transform=to_tensor)
            loader = ctx.loader(images, global_batch_size=64, num_workers=2)
    """

    extensions = EXTENSIONS

    def __init__(  # noqa: PLR0913 - torchvision's arguments and the way to a bucket, all by name
        self,
        uri: Location,
        transform: Callable[[Any], Any] | None = None,
        target_transform: Callable[[Any], Any] | None = None,
        *,
        storage: Readable | None = None,
        anonymous: bool = False,
        endpoint_url: str | None = None,
        region: str | None = None,
        cache: str | Path | None = None,
        index: str | Path | None = None,
        on_error: OnError = "raise",
        loader: Callable[[BinaryIO], Any] = pil_loader,
        is_valid_file: Callable[[str], bool] | None = None,
        allow_empty: bool = False,
    ) -> None:
        if on_error not in {"raise", "skip"}:
            msg = f"on_error is {on_error!r}; choose raise or skip"
            raise InvalidParamsError(msg)
        source, prefix = readable_at(
            uri, storage, anonymous=anonymous, endpoint_url=endpoint_url, region=region
        )
        self._source, self._prefix = through_cache(source, cache), prefix
        where = f"{self._source.uri.rstrip('/')}/{self._prefix}".rstrip("/")
        super().__init__(where, transform=transform, target_transform=target_transform)
        listed = (
            ListedObject(item.key.removeprefix(self._prefix), item.num_bytes, item.etag)
            for item in list_dataset(self._source, self._prefix)
        )
        found = index_images(
            chain(
                _local_classes(source, prefix),
                listed if index is None else read_index(index, where),
            ),
            where,
            is_valid_file,
            allow_empty=allow_empty,
        )
        self.loader = loader
        self.on_error = on_error
        self.classes = found.classes
        self.class_to_idx = {name: target for target, name in enumerate(found.classes)}
        self.num_skipped = 0
        """In this process."""
        self._objects, self._targets = found.objects, found.targets
        self._ahead: ReadAhead[Contents] | None = None
        # A first read finds out what forked loader workers need too: they inherit it.
        source.read_many([self._part(0)] if len(self) else [])

    @property
    def samples(self) -> list[tuple[str, int]]:
        """(URI, class number) of each image; to choose images take `torch.utils.data.Subset`."""
        return [(self._uri(index), target) for index, target in enumerate(self._targets)]

    @property
    def targets(self) -> list[int]:
        """The class number of each image, made again each time."""
        return self._targets.tolist()

    @property
    def layout(self) -> str:
        """The images by a digest of their names; one that was replaced remains the same."""
        return f"images with the digest {self._objects.columns[0].digest()[:12]}"

    @property
    def may_skip(self) -> bool:
        """Whether a batch may be smaller than asked for."""
        return self.on_error == "skip"

    def __len__(self) -> int:
        return len(self._targets)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        """Return one image with its class number; a single image is never skipped.

        Raises:
            CorruptImageError: it can't be decoded.
            StorageError: it can't be read.
        """
        at = range(len(self))[index]
        (data,) = self._read([at])
        return self._sample(at, data)

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Any, Any]]:
        """Return the images of a batch with their class numbers, as a DataLoader asks."""
        return self.fetch_seeded(indices)[1]

    def fetch_seeded(
        self, indices: Sequence[int], before_each: Callable[[int], None] | None = None
    ) -> tuple[list[int], list[tuple[Any, Any]]]:
        """Return (positions, samples) of a batch, without the images that were skipped.

        Args:
            indices: numbers of the batch's images. The returned positions are places in this
                sequence.
            before_each: a function that is called with a sample's position before the sample is
                decoded and transformed, for example to seed random generators.

        Raises:
            CorruptImageError, StorageError: an image can't be decoded or read, and `on_error` is
                "raise" or all images of the batch failed.
        """
        if self._ahead is None:
            self._ahead = ReadAhead(self._read)
        kept: list[int] = []
        samples = []
        for position, data in enumerate(self._ahead.read(indices)):
            if before_each is not None:
                before_each(position)
            try:
                samples.append(self._sample(indices[position], data))
            except _FAULTS_OF_AN_IMAGE as error:
                self._skip(error, is_all=not kept and position == len(indices) - 1)
            else:
                kept.append(position)
        return kept, samples

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what belongs to this process."""
        return {**self.__dict__, "_ahead": None, "num_skipped": 0}

    def _uri(self, index: int) -> str:
        return f"{self.root}/{self._objects[index].key}"

    def _read(self, indices: Sequence[int]) -> Contents:
        return self._source.read_many([self._part(index) for index in indices])

    def _part(self, index: int) -> ObjectPart:
        found = self._objects[index]
        return ObjectPart(self._prefix + found.key, found.num_bytes, None, found.etag)

    def _sample(self, index: int, data: bytes | StorageError) -> tuple[Any, Any]:
        if isinstance(data, StorageError):
            raise data
        try:
            image = self.loader(BytesIO(data))
        except MemoryError:  # no fault of the image
            raise
        except Exception as error:
            raise _corrupt(self._uri(index), error) from error
        target: Any = self._targets[index]
        if self.transform is not None:
            image = self.transform(image)
        if self.target_transform is not None:
            target = self.target_transform(target)
        return image, target

    def _skip(self, error: Exception, *, is_all: bool) -> None:
        if self.on_error == "raise":
            raise error
        self.num_skipped += 1
        if is_all:
            msg = f"every image of a batch had to be skipped; the last one: {error}"
            raise CorruptImageError(msg) from error
        if self.num_skipped.bit_count() == 1:  # 1, 2, 4, 8, ...: so many don't fill the log
            logger.warning(
                "%d skipped in this process of the dataset %s; the last one: %s",
                self.num_skipped,
                self.root,
                error,
            )


def _local_classes(source: Readable, prefix: str) -> Iterator[ListedObject]:
    """Yield a marker for each class folder of a local one: an empty folder has no object."""
    root = source.local_folder and source.local_folder / prefix
    if root and root.is_dir():
        for entry in root.iterdir():
            if entry.is_dir() and entry.name != RESERVED_FOLDER:
                yield ListedObject(f"{entry.name}/", 0, "")


class _NamingLoader:
    """Torchvision's loader, or the user's own, whose errors name the image."""

    def __init__(self, loader: Callable[[str], Any]) -> None:
        """Decode with this function of a path."""
        self.loader = loader

    def __call__(self, path: str) -> Any:
        """Decode an image.

        Raises:
            CorruptImageError: it can't be decoded.
            OSError: it can't be read.
        """
        try:
            return self.loader(path)
        except MemoryError:
            raise
        except Exception as error:
            # Those of the disk have a number, those of PIL are about the content.
            if isinstance(error, OSError) and error.errno is not None:
                raise
            raise _corrupt(path, error) from error


def _corrupt(name: str, error: Exception) -> CorruptImageError:
    what = f"{name} can't be decoded: {type(error).__name__}: {error}"
    return CorruptImageError(f"{what}; replace it, or pass on_error='skip'")


# Not its base, which `help` would show.
HasLayout.register(S3ImageFolder)


@exported_by("prefect_torch_ddp.data")
def image_folder(
    uri: Location,
    transform: Callable[[Any], Any] | None = None,
    target_transform: Callable[[Any], Any] | None = None,
    *,
    storage: Readable | None = None,
    **options: Any,
) -> "ImageFolder | S3ImageFolder":
    """Return torchvision's own `ImageFolder` for a local path, else an `S3ImageFolder`.

    Args:
        uri: a path, `s3://bucket/prefix`, or a storage, such as `ctx.source`.
        transform: applied to each decoded image.
        target_transform: applied to each class number.
        storage: the storage to read from; `uri` is then a path in that storage.
        **options: those of S3ImageFolder. For a local folder, which torchvision reads, `cache` has
            no effect, and of the `index` the images' names are compared. With on_error="skip", or
            if the folder is the root of a storage in which runs are kept, S3ImageFolder reads it.

    Raises:
        InvalidParamsError, NoImagesError, StorageError: see S3ImageFolder; the first also if a
            local folder has other images than the index. Torchvision raises a FileNotFoundError.

    Example:
        The images of the run's source:

            from prefect_torch_ddp.data import image_folder

            dataset = image_folder(ctx.source, transform=to_tensor)
            loader = ctx.loader(dataset, global_batch_size=64)
    """
    access = {name: options.get(name) for name in ("anonymous", "endpoint_url", "region")}
    source, prefix = readable_at(uri, storage, **access)
    folder = source.local_folder and source.local_folder / prefix
    # Unfinished files of a storage would be a class to torchvision.
    is_ours = folder is None or (folder / RESERVED_FOLDER).exists()
    if is_ours or options.get("on_error", "raise") != "raise":
        return S3ImageFolder(uri, transform, target_transform, storage=storage, **options)
    theirs = {"loader", "is_valid_file", "allow_empty"}
    unknown = options.keys() - theirs - access.keys() - {"cache", "index", "on_error"}
    if unknown:
        msg = f"image_folder has no argument {', '.join(sorted(unknown))}"
        raise TypeError(msg)
    kept = {name: value for name, value in options.items() if name in theirs}
    named = {**kept, "loader": _NamingLoader(options.get("loader", default_loader))}
    dataset = ImageFolder(str(folder), transform, target_transform, **named)
    if (index := options.get("index")) is not None:
        where = f"{source.uri.rstrip('/')}/{prefix}".rstrip("/")
        _check_names(dataset, index, where, chosen="is_valid_file" in kept)
    return dataset


def _check_names(dataset: ImageFolder, index: str | Path, where: str, *, chosen: bool) -> None:
    """Refuse a folder whose images changed: numbers, as of a split, would mean others of them."""
    listed = {item.key for item in read_index(index, where, may_have_moved=True)}
    below = len(os.path.join(dataset.root, ""))  # noqa: PTH118 - of each image, where Path is slow
    here = {path[below:] for path, _ in dataset.samples}
    images = {key for key in listed if "/" in key and key.lower().endswith(EXTENSIONS)}
    new, gone = sorted(here - listed), [] if chosen else sorted(images - here)
    if new or gone:
        msg = (
            f"{dataset.root} has other images than its index in {index}: {len(new)} new, "
            f"{len(gone)} gone, such as {(new + gone)[0]}. Put them back; or begin a new run, "
            "which prepares its data again"
        )
        raise InvalidParamsError(msg)
