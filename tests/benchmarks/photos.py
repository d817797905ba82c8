"""Photos of 500 times 375, as JPEG of some 35 kB."""

import io
from pathlib import Path

import numpy as np
from PIL import Image


def photo(generator: np.random.Generator) -> bytes:
    """Draw one."""
    coarse = generator.integers(0, 256, (25, 33, 3), dtype=np.uint8)
    image = np.asarray(
        Image.fromarray(coarse).resize((500, 375), Image.Resampling.BICUBIC), dtype=np.int16
    )
    grainy = (image + generator.integers(-12, 13, image.shape)).clip(0, 255).astype(np.uint8)
    Image.fromarray(grainy).save(file := io.BytesIO(), "JPEG", quality=72)
    return file.getvalue()


def write_photos(folder: Path, num: int, num_classes: int = 10) -> None:
    """Write some, in a folder for each class."""
    generator = np.random.default_rng(0)
    for number in range(num):
        path = folder / f"class{number % num_classes}" / f"{number:06}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(photo(generator))
