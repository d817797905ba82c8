"""Small folders of different images, and what ranks get of them."""

import io
import random
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from prefect_torch_ddp.data.loader import RankLoader
from prefect_torch_ddp.storage.directory import DirectoryStorage
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


def write_images(storage: Storage, classes: list[str], num_each: int) -> None:
    """Write JPEG images of 72x64 pixels, noise on a colour that tells the class."""
    generator = np.random.default_rng(0)
    for number, name in enumerate(classes):
        for i in range(num_each):
            pixels = generator.integers(0, 60, (64, 72, 3)) + 9 * np.array(
                [number, 20 - number, number // 2]
            )
            file = io.BytesIO()
            Image.fromarray(pixels.astype(np.uint8)).save(file, "JPEG")
            storage.write(f"{name}/{name}{i:02}.jpg", file.getvalue())
    storage.write("notes.txt", b"no class")
    if isinstance(storage, DirectoryStorage):
        (storage.root / ".tmp").rmdir()  # where it wrote; torchvision would list it as a class


def write_cifar10(folder: Path, num_each: int) -> None:
    """Write the binary version's six files, with images whose red tells their class."""
    folder.mkdir()
    generator = np.random.default_rng(0)
    for name in (*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"):
        targets = np.arange(num_each, dtype=np.uint8) % 10
        pixels = generator.integers(0, 256, (num_each, 3, 1024), dtype=np.uint8)
        pixels[:, 0] = 25 * targets[:, None]
        (folder / name).write_bytes(
            np.concatenate([targets[:, None], pixels.reshape(num_each, -1)], axis=1).tobytes()
        )
