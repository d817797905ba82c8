"""The ways to read images in files or objects of their own: local, ours, boto3's and
s3torchconnector's.

Imported by the interpreters of other environments too: at the top only what all of them have.
"""

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from io import BytesIO
from typing import Any

import torch
from PIL import Image
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler
from torchvision.transforms import functional

BATCH, NUM_WORKERS, NUM_THREADS = 64, 2, 16

Epoch = Callable[[], Iterable[Any]]
"""Gives the batches of the next epoch: images and classes."""


def to_tensor(image: Image.Image) -> torch.Tensor:
    """Resize, as a training would."""
    return functional.to_tensor(functional.resize(image, [224, 224]))


def decode(data: bytes) -> torch.Tensor:
    """Make a tensor of a file's content."""
    return to_tensor(Image.open(BytesIO(data)).convert("RGB"))


def class_of(key: str) -> int:
    """Return an image's class."""
    return int(key.split("/")[-2].removeprefix("class"))


class ByKey(Dataset[Any]):
    """Images of a bucket, item by item, by whatever reads a key."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self.plan = plan
        self.keys: list[str] = plan["keys"]
        self.client: tuple[int, Any] = (0, None)
        self.load()

    def load(self) -> None:
        """Load the library before loader processes are forked, as a training has done that
        reads from S3 at all."""
        import boto3.session  # noqa: F401

    def __len__(self) -> int:
        return len(self.keys)

    def connect(self) -> Any:
        """Make a boto3 client."""
        from boto3.session import Session

        names = {
            "aws_access_key_id": self.plan["key"],
            "aws_secret_access_key": self.plan["secret"],
        }
        session = Session(region_name="us-east-1", **names)
        return session.client("s3", endpoint_url=self.plan["endpoint_url"])

    def own_client(self) -> Any:
        """Return this process's client."""
        if self.client[0] != os.getpid():
            self.client = (os.getpid(), self.connect())
        return self.client[1]

    def read(self, key: str) -> bytes:
        """Read an object."""
        data: bytes = (
            self.own_client().get_object(Bucket=self.plan["bucket"], Key=key)["Body"].read()
        )
        return data

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return decode(self.read(self.keys[index])), class_of(self.keys[index])


class NewClientEach(ByKey):
    """As dask-pytorch-ddp's S3ImageFolder reads: a client for each image, and its managed
    download (a HEAD and a GET)."""

    def read(self, key: str) -> bytes:
        """Read an object."""
        data = BytesIO()
        self.connect().download_fileobj(self.plan["bucket"], key, data)
        return data.getvalue()


class Crt(ByKey):
    """s3torchconnector's client, which is AWS's common runtime."""

    def load(self) -> None:
        """Load the library before loader processes are forked."""
        import s3torchconnector._s3client  # noqa: F401

    def connect(self) -> Any:
        """Make one of its clients."""
        from s3torchconnector import S3ClientConfig
        from s3torchconnector._s3client import S3Client

        return S3Client(
            region="us-east-1",
            endpoint=self.plan["endpoint_url"],
            s3client_config=S3ClientConfig(force_path_style=True),
        )

    def read(self, key: str) -> bytes:
        """Read an object."""
        data: bytes = self.own_client().get_object(self.plan["bucket"], key).read()
        return data


class CrtAhead(Crt):
    """The same, a batch at once in threads, and the next one meanwhile: its best way."""

    ahead: tuple[int, Any, Any] = (0, None, None)

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[torch.Tensor, int]]:
        from prefect_torch_ddp.data.lookahead import ReadAhead

        if self.ahead[0] != os.getpid():
            pool = ThreadPoolExecutor(NUM_THREADS)
            self.own_client()
            read = ReadAhead(
                lambda batch: list(pool.map(lambda index: self.read(self.keys[index]), batch))
            )
            self.ahead = (os.getpid(), read, pool)
        found = zip(indices, self.ahead[1].read(indices), strict=True)
        return [(decode(data), class_of(self.keys[index])) for index, data in found]


def s3_map_dataset(plan: dict[str, Any]) -> Dataset[Any]:
    """s3torchconnector's own dataset."""
    from s3torchconnector import S3ClientConfig, S3MapDataset

    uris = [f"s3://{plan['bucket']}/{key}" for key in plan["keys"]]
    options = {
        "region": "us-east-1",
        "endpoint": plan["endpoint_url"],
        "s3client_config": S3ClientConfig(force_path_style=True),
    }
    made: Dataset[Any] = S3MapDataset.from_objects(
        uris, transform=lambda file: (decode(file.read()), class_of(file.key)), **options
    )
    return made


def ours(plan: dict[str, Any]) -> Dataset[Any]:
    """Ours, with what the plan names: an index, a cache, shards."""
    from prefect_torch_ddp.data import PackedObjects, S3ImageFolder
    from prefect_torch_ddp.storage.s3.storage import S3Storage

    source: Any = S3Storage(
        plan["bucket"],
        plan["prefix"],
        endpoint_url=plan["endpoint_url"],
        access_key_id=plan["key"],
        secret_access_key=plan["secret"],
        region="us-east-1",
    )
    if plan.get("shards"):
        return S3ImageFolder(PackedObjects(replace(source, prefix=plan["shards"])), to_tensor)
    return S3ImageFolder(
        source, to_tensor, index=plan["index"], cache=plan["scratch"] if plan.get("cache") else None
    )


def local(plan: dict[str, Any]) -> Dataset[Any]:
    """Read by torchvision, from the local disk: the unit."""
    from torchvision.datasets import ImageFolder

    made: Dataset[Any] = ImageFolder(plan["folder"], to_tensor)
    return made


def by_stock_loader(
    make: Callable[[dict[str, Any]], Dataset[Any]], *, is_ahead: bool = False
) -> Callable[[dict[str, Any]], Epoch]:
    """Load a dataset by the stock DataLoader, in random order; with look-ahead if the dataset
    does that."""

    def way(plan: dict[str, Any]) -> Epoch:
        dataset = make(plan)
        # So few that both loader processes have as much to do, where only some of the images
        # are read.
        size = max(1, min(BATCH, len(plan["keys"]) // (4 * NUM_WORKERS)))

        def epoch() -> Iterable[Any]:
            sampler: Any = BatchSampler(RandomSampler(dataset), size, drop_last=False)  # type: ignore[arg-type]
            if is_ahead:
                from prefect_torch_ddp.data.lookahead import LookAhead

                sampler = LookAhead(sampler, NUM_WORKERS)
            return DataLoader(
                dataset,
                batch_sampler=sampler,
                num_workers=NUM_WORKERS,
                multiprocessing_context="fork",
            )

        return epoch

    return way


WAYS: dict[str, Callable[[dict[str, Any]], Epoch]] = {
    "local": by_stock_loader(local),
    "ours": by_stock_loader(ours, is_ahead=True),
    "boto3": by_stock_loader(ByKey),
    "new client each": by_stock_loader(NewClientEach),
    "S3MapDataset": by_stock_loader(s3_map_dataset),
    "CRT, look-ahead": by_stock_loader(CrtAhead, is_ahead=True),
}
