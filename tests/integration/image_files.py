"""Owns small image folders for tests, every image another one, in classes of uneven sizes; and
what ranks get of them."""

import io
import random
from pathlib import Path
from typing import Any

from PIL import Image

from prefect_torch_ddp.data.loader import RankLoader
from prefect_torch_ddp.storage.protocol import Storage


def image_files(num: int = 60, size: int = 8) -> dict[str, bytes]:
    """Make PNG files, each of one colour that no other has."""
    rng = random.Random(5)
    files = {}
    for number in range(num):
        name = f"{rng.choice(['cat', 'dog', 'eel'])}/{number:03}.png"
        png = io.BytesIO()
        Image.new("RGB", (size, size), (number, 255 - number, rng.randrange(256))).save(png, "png")
        files[name] = png.getvalue()
    return files


def write_folder(root: Path, files: dict[str, bytes]) -> Path:
    """Write files below a folder; return it."""
    for name, data in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return root


def write_objects(storage: Storage, files: dict[str, bytes]) -> None:
    """Write files into a storage."""
    for name, data in files.items():
        storage.write(name, data)


def global_batches(dataset: Any, world_size: int, **options: Any) -> dict[int, list[Any]]:
    """Load an epoch on all ranks; return (index, label, pixel) of the samples of each global
    batch, in order."""
    batches: dict[int, list[Any]] = {}
    for rank in range(world_size):
        loader = RankLoader(
            dataset,
            global_batch_size=14,
            rank=rank,
            world_size=world_size,
            seed=3,
            keep_ids=True,
            **options,
        )
        for (images, targets), share in loader.lockstep(epoch=1):
            pixels = [tuple(image[:, 0, 0].tolist()) for image in images[: share.num_local]]
            samples = list(
                zip(share.samples, targets[: share.num_local].tolist(), pixels, strict=True)
            )
            batches.setdefault(share.batch, []).extend(samples)
    return batches
