"""Pictures of an evaluation: the confusion matrix and the worst samples, each a small SVG."""

import base64
import html
import io
import math
from collections.abc import Sequence
from unicodedata import east_asian_width

from prefect_torch_ddp.results import WorstSample
from prefect_torch_ddp.tasks.report.markdown import middle_cut, svg_image, svg_text

Matrix = Sequence[Sequence[int]]

GREY = 'fill="#8c959f"'
RIGHT, WRONG = (31, 111, 235), (209, 73, 91)
"""Of a cell that holds all of its true class; both can be seen on a light and on a dark page."""
NUM_SHADES = 16
MAX_CLASSES = 256
MAX_NAMED_CLASSES = 60
"""Beyond it rows and columns are too small for a name."""
SIDE = 440
"""Of the cells of a matrix of medium size, in pixels."""
MIN_CELL, MAX_CELL, MIN_NAMED_CELL, MIN_COUNT_CELL = 3, 44, 11, 16
LETTER = 0.58
"""Width of a letter as a share of its size, about."""
MAX_LETTERS = 18
TILE, GAP, LINE = 96, 12, 15
TILES_IN_ROW = 4
"""So that a page of 500 pixels needn't shrink them."""
MAX_TILE_LETTERS = 15
SHARP = "image-rendering:pixelated"


def matrix_picture(matrix: Matrix, names: Sequence[str]) -> str:
    """Draw a confusion matrix as a markdown image, true classes down, predicted ones across.

    A cell's colour is its share of the true class: blue on the diagonal, red elsewhere. Names
    are shown up to `MAX_NAMED_CLASSES`, else every tenth number, and counts if they fit;
    nothing beyond `MAX_CLASSES`.
    """
    num = len(matrix)
    if not 0 < num <= MAX_CLASSES:
        return ""
    is_named = num <= MAX_NAMED_CLASSES
    smallest = MIN_NAMED_CELL if is_named else MIN_CELL
    cell = max(smallest, min(MAX_CELL, (SIDE if is_named else 1.5 * SIDE) // num))
    size = min(12, cell - 1) if is_named else 11
    labels = [middle_cut(name, MAX_LETTERS) for name in names]
    if not is_named:
        labels = [str(i) if i % 10 == 0 else "" for i in range(1, num + 1)]
    left = top = 30 + max(map(_num_columns, labels)) * size * LETTER
    side = num * cell
    cells = f'x="{left:g}" y="{top:g}" width="{side:g}" height="{side:g}"'
    drawn = [
        f'<image {cells} style="{SHARP}" href="{_shaded(matrix)}"/>',
        f'<rect {cells} fill="none" stroke="#8c959f"/>',
        svg_text(left + side / 2, 14, "predicted class", GREY),
        _upright(14, top + side / 2, "true class", GREY, "middle"),
        *(_counts(matrix, cell, left, top) if cell >= MIN_COUNT_CELL else ()),
    ]
    look = f'font-size="{size:g}"'
    for i, label in enumerate(labels):
        beside = (i + 0.5) * cell + size * 0.35
        if label:
            drawn.append(svg_text(f"{left - 6:g}", top + beside, label, look, "end"))
            drawn.append(_upright(left + beside, top - 6, label, look))
    return svg_image("confusion matrix", left + max(side, 250) + 10, top + side + 10, drawn)


def worst_picture(samples: Sequence[WorstSample]) -> str:
    """Draw the worst samples in rows as a markdown image; nothing without any."""
    drawn, row_height = [], TILE + GAP + 3 * LINE
    for i, sample in enumerate(samples):
        x, y = i % TILES_IN_ROW * (TILE + GAP) + GAP, i // TILES_IN_ROW * row_height + GAP
        colour = WRONG if sample.true != sample.predicted else RIGHT
        loss = "nan or inf" if sample.loss is None else f"{sample.loss:.4g}"
        lines = (
            (middle_cut(sample.true, MAX_TILE_LETTERS), ""),
            (f"→ {middle_cut(sample.predicted, MAX_TILE_LETTERS)}", f'fill="rgb{colour}"'),
            (f"loss {loss}", GREY),
        )
        at = f'x="{x}" y="{y}" width="{TILE}" height="{TILE}"'
        drawn.append(f'<image {at} style="{SHARP}" href="{html.escape(sample.image)}"/>')
        for k, (words, look) in enumerate(lines, 1):
            drawn.append(svg_text(x + TILE / 2, y + TILE + k * LINE, words, look))
    width = min(len(samples), TILES_IN_ROW) * (TILE + GAP) + GAP
    height = math.ceil(len(samples) / TILES_IN_ROW) * row_height + GAP
    return svg_image("worst samples", width, height, drawn) if drawn else ""


def _shaded(matrix: Matrix) -> str:
    """Return the cells as a PNG of a pixel each: 40,000 shapes would make a page too large."""
    from PIL import Image  # noqa: PLC0415 - few processes draw

    pixels = bytes(
        _shade(count, sum(row)) + (0 if i == j else NUM_SHADES + 1)
        for i, row in enumerate(matrix)
        for j, count in enumerate(row)
    )
    image = Image.frombytes("P", (len(matrix), len(matrix)), pixels)
    image.putpalette([part for each in (RIGHT, WRONG) for part in each * (NUM_SHADES + 1)])
    image.save(file := io.BytesIO(), "png", optimize=True, transparency=2 * _opacities())
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def _shade(count: int, support: int) -> int:
    # By the root, so that a hundredth of a class can be seen; none at all is transparent.
    return 1 + round((NUM_SHADES - 1) * math.sqrt(count / support)) if count else 0


def _opacities() -> bytes:
    return bytes([0, *(round(255 * (1 + shade) / NUM_SHADES) for shade in range(NUM_SHADES))])


def _counts(matrix: Matrix, cell: float, left: float, top: float) -> list[str]:
    drawn = []
    for i, row in enumerate(matrix):
        for j, count in enumerate(row):
            words = str(count) if count < 10_000 else f"{count / 1000:.0f}k"  # noqa: PLR2004
            size = min(13, cell / max(2, len(words)) / LETTER * 0.9)
            if count and size >= 7:  # noqa: PLR2004 - what is smaller can't be read
                white = ' fill="#ffffff"' if count / sum(row) > 0.35 else ""  # noqa: PLR2004
                x, y = left + (j + 0.5) * cell, top + (i + 0.5) * cell + size * 0.35
                drawn.append(svg_text(f"{x:g}", y, words, f'font-size="{size:g}"{white}'))
    return drawn


def _upright(x: float, y: float, words: str, look: str, anchor: str = "start") -> str:
    turned = f"translate({x:g},{y:g}) rotate(-90)"
    return f'<g transform="{turned}">{svg_text(0, 0, words, look, anchor)}</g>'


def _num_columns(words: str) -> int:
    return sum(2 if east_asian_width(letter) in "WF" else 1 for letter in words)
