"""The ways of libraries that read images out of formats of their own: webdataset, litdata
and mosaicml-streaming.

Run as a script by such a library's environment it writes the format:
`python -m tests.benchmarks.other_formats litdata FOLDER TO SHARD_BYTES`.
"""

import os
import random
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tests.benchmarks.image_ways import BATCH, NUM_WORKERS, Epoch, decode

SHUFFLE_BUFFER = 1000


def webdataset(plan: dict[str, Any]) -> Epoch:
    """Read our shards as streams by curl, as it does over http; loader processes share them,
    shards and a buffer are shuffled."""
    import webdataset as wds

    urls = plan["shard_urls"]
    dataset = (
        wds.WebDataset(urls, shardshuffle=len(urls)).shuffle(SHUFFLE_BUFFER).to_tuple("jpg", "cls")
    )
    dataset = dataset.map_tuple(decode, int).batched(BATCH)
    return lambda: wds.WebLoader(dataset, batch_size=None, num_workers=NUM_WORKERS)


def litdata(plan: dict[str, Any]) -> Epoch:
    """Read its chunks; it keeps them on the local disk, as it does by default."""
    from litdata import StreamingDataLoader, StreamingDataset
    from litdata.streaming import downloader

    downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = (
        True  # it fetches chunks by obstore, and has no way to say this
    )
    names = {
        "aws_access_key_id": plan["key"],
        "aws_secret_access_key": plan["secret"],
        "region_name": "us-east-1",
    }
    dataset = StreamingDataset(
        f"s3://{plan['bucket']}/litdata",
        cache_dir=plan["scratch"],
        shuffle=True,
        storage_options={"endpoint_url": plan["endpoint_url"], **names},
        transform=_sample,
    )
    loader = StreamingDataLoader(dataset, batch_size=BATCH, num_workers=NUM_WORKERS)
    return lambda: loader


def streaming(plan: dict[str, Any]) -> Epoch:
    """Read its shards; it keeps them on the local disk, as it does by default."""
    from streaming import StreamingDataset
    from torch.utils.data import DataLoader

    os.environ |= {"S3_ENDPOINT_URL": plan["endpoint_url"], "AWS_DEFAULT_REGION": "us-east-1"}

    class Decoding(StreamingDataset):  # type: ignore[misc]
        def __getitem__(self, at: Any) -> Any:
            return _sample(super().__getitem__(at))

    remote = f"s3://{plan['bucket']}/mosaicml-streaming"
    dataset = Decoding(remote=remote, local=plan["scratch"], shuffle=True, batch_size=BATCH)
    for stream in dataset.streams:
        # The boto3 client that fetched the index would cross the fork, and both loader
        # processes read from its one connection: with version 0.13, 20 ms away, shards then
        # hold bytes of one another.
        stream._downloader.clean_up()
    loader = DataLoader(dataset, batch_size=BATCH, num_workers=NUM_WORKERS)
    return lambda: loader


def _sample(sample: dict[str, Any]) -> tuple[Any, int]:
    return decode(sample["image"]), sample["label"]


WAYS: dict[str, Callable[[dict[str, Any]], Epoch]] = {
    "webdataset": webdataset,
    "litdata": litdata,
    "streaming": streaming,
}


def load(path: str) -> dict[str, Any]:
    """Return a file as both formats keep it: its bytes, not decoded, and its class."""
    return {
        "image": Path(path).read_bytes(),
        "label": int(Path(path).parent.name.removeprefix("class")),
    }


def write_litdata(paths: list[str], to: str, shard_bytes: int) -> None:
    """Write its chunks and their index."""
    from litdata import optimize

    optimize(
        load,
        paths,
        output_dir=to,
        chunk_bytes=shard_bytes,
        num_workers=1,
        keep_data_ordered=True,
        reorder_files=False,
    )


def write_streaming(paths: Iterable[str], to: str, shard_bytes: int) -> None:
    """Write its shards (MDS) and their index."""
    from streaming import MDSWriter

    with MDSWriter(
        out=to, columns={"image": "bytes", "label": "int"}, size_limit=shard_bytes
    ) as writer:
        for path in paths:
            writer.write(load(path))


WRITERS = {"litdata": write_litdata, "mosaicml-streaming": write_streaming}


def main() -> None:
    """Write one format, in an order by chance."""
    name, folder, to, shard_bytes = sys.argv[1:]
    paths = sorted(map(str, Path(folder).rglob("*.jpg")))
    random.Random(0).shuffle(paths)
    WRITERS[name](paths, to, int(shard_bytes))


if __name__ == "__main__":
    main()
