"""Pictures of an evaluation: the confusion matrix and the worst samples, each a small SVG.

Black on white of their own, so that they read alike on a light and on a dark page.
"""

import base64
import html
import io
import math
from collections.abc import Sequence
from unicodedata import east_asian_width

from prefect_torch_ddp.results import WorstSample

Matrix = Sequence[Sequence[int]]

INK, GREY = "#24292f", "#8c959f"
RIGHT, WRONG = (8, 74, 150), (178, 30, 45)
"""Of a cell that holds all of its true class."""
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
LEGEND = (0.01, 0.1, 0.5, 1.0)
TILE, GAP, LINE = 96, 12, 15
TILES_IN_ROW = 4
"""So that a page of 500 pixels needn't shrink them."""
MAX_TILE_LETTERS = 15
SHARP = "image-rendering:pixelated"


def matrix_picture(matrix: Matrix, names: Sequence[str]) -> str:
    """Draw a confusion matrix as a markdown image, true classes down, predicted ones across.

    A cell's colour is its share of the true class: blue on the diagonal, red beside it. Names
    are shown up to `MAX_NAMED_CLASSES`, else every tenth number, and counts where they fit;
    nothing beyond `MAX_CLASSES`.
    """
    num = len(matrix)
    if not 0 < num <= MAX_CLASSES:
        return ""
    is_named = num <= MAX_NAMED_CLASSES
    smallest = MIN_NAMED_CELL if is_named else MIN_CELL
    cell = max(smallest, min(MAX_CELL, (SIDE if is_named else 1.5 * SIDE) // num))
    size = min(12, cell - 1) if is_named else 11
    labels = [_words(name) if is_named else _tenth(i) for i, name in enumerate(names, 1)]
    longest = max(map(_num_columns, labels)) * size * LETTER
    left = top = 30 + longest
    side, bottom = num * cell, top + num * cell
    cells = f'x="{left:g}" y="{top:g}" width="{side:g}" height="{side:g}"'
    drawn = [
        f'<image {cells} style="{SHARP}" href="{_shaded(matrix)}"/>',
        f'<rect {cells} fill="none" stroke="{GREY}"/>',
        _text((left + side / 2, 14), "predicted class", 12, "middle", GREY),
        _upright((14, top + side / 2), "true class", 12, "middle", GREY),
        _counts(matrix, cell, left, top),
        _legend(left, bottom + 16),
    ]
    is_short = longest < cell
    for i, label in enumerate(labels):
        if not label:
            continue
        middle = (i + 0.5) * cell
        beside = middle + size * 0.35
        drawn.append(_text((left - 6, top + beside), label, size, "end"))
        drawn.append(
            _text((left + middle, top - 6), label, size, "middle")
            if is_short
            else _upright((left + beside, top - 6), label, size)
        )
    width, height = left + max(side, 250) + 10, bottom + 42
    return _image("confusion matrix", width, height, drawn)


def worst_picture(samples: Sequence[WorstSample]) -> str:
    """Draw the worst samples in rows as a markdown image; nothing without any."""
    drawn, row_height = [], TILE + GAP + 3 * LINE
    for i, sample in enumerate(samples):
        x, y = i % TILES_IN_ROW * (TILE + GAP) + GAP, i // TILES_IN_ROW * row_height + GAP
        colour = WRONG if sample.true != sample.predicted else RIGHT
        loss = "nan or inf" if sample.loss is None else f"{sample.loss:.4g}"
        lines = (
            (_words(sample.true, MAX_TILE_LETTERS), INK),
            (_words(f"→ {sample.predicted}", MAX_TILE_LETTERS), f"rgb{colour}"),
            (f"loss {loss}", GREY),
        )
        at = f'x="{x}" y="{y}" width="{TILE}" height="{TILE}"'
        drawn.append(f'<image {at} style="{SHARP}" href="{html.escape(sample.image)}"/>')
        for k, (words, ink) in enumerate(lines, 1):
            drawn.append(_text((x + TILE / 2, y + TILE + k * LINE), words, 12, "middle", ink))
    width = min(len(samples), TILES_IN_ROW) * (TILE + GAP) + GAP
    height = math.ceil(len(samples) / TILES_IN_ROW) * row_height + GAP
    return _image("worst samples", width, height, drawn) if drawn else ""


def _image(caption: str, width: float, height: float, drawn: Sequence[str]) -> str:
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}"'
        f' viewBox="0 0 {width:g} {height:g}" font-family="sans-serif">'
        f'<rect width="{width:g}" height="{height:g}" fill="#ffffff"/>{"".join(drawn)}</svg>'
    )
    return f"![{caption}](data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()})"


def _shaded(matrix: Matrix) -> str:
    """Return the cells as a PNG of a pixel each: 40,000 shapes would make a page too large."""
    from PIL import Image  # noqa: PLC0415 - few processes draw

    pixels = bytes(
        _shade(count, sum(row)) + (0 if i == j else NUM_SHADES + 1)
        for i, row in enumerate(matrix)
        for j, count in enumerate(row)
    )
    image = Image.frombytes("P", (len(matrix), len(matrix)), pixels)
    image.putpalette([part for colour in (RIGHT, WRONG) for part in _palette(colour)])
    image.save(file := io.BytesIO(), "png", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def _shade(count: int, support: int) -> int:
    # By the root, so that a hundredth of a class can be seen; none at all is white.
    return 1 + round((NUM_SHADES - 1) * math.sqrt(count / support)) if count else 0


def _palette(colour: tuple[int, int, int]) -> list[int]:
    shares = [0.0, *((1 + shade) / NUM_SHADES for shade in range(NUM_SHADES))]
    return [round(255 - share * (255 - part)) for share in shares for part in colour]


def _counts(matrix: Matrix, cell: float, left: float, top: float) -> str:
    if cell < MIN_COUNT_CELL:
        return ""
    drawn = []
    for i, row in enumerate(matrix):
        for j, count in enumerate(row):
            words = str(count) if count < 10_000 else f"{count / 1000:.0f}k"  # noqa: PLR2004
            size = min(13, cell / max(2, len(words)) / LETTER * 0.9)
            if count and size >= 7:  # noqa: PLR2004 - what is smaller can't be read
                colour = "#ffffff" if count / sum(row) > 0.2 else INK  # noqa: PLR2004
                x, y = left + (j + 0.5) * cell, top + (i + 0.5) * cell + size * 0.35
                drawn.append(_text((x, y), words, size, "middle", colour))
    return "".join(drawn)


def _legend(x: float, y: float) -> str:
    drawn = [_text((x, y + 20), "share of the true class", 11, colour=GREY)]
    for i, share in enumerate(LEGEND):
        for k, colour in enumerate((RIGHT, WRONG)):
            start = 3 * _shade(round(1000 * share), 1000)
            shown = tuple(_palette(colour)[start : start + 3])
            at = f'x="{x + 60 * i + 12 * k:g}" y="{y - 10:g}" width="12" height="12"'
            drawn.append(f'<rect {at} fill="rgb{shown}"/>')
        drawn.append(_text((x + 60 * i + 27, y), f"{share:.0%}", 11))
    return "".join(drawn)


def _upright(at: tuple[float, float], words: str, size: float, *look: str) -> str:
    turned = f"translate({at[0]:g},{at[1]:g}) rotate(-90)"
    return f'<g transform="{turned}">{_text((0, 0), words, size, *look)}</g>'


def _num_columns(words: str) -> int:
    return sum(2 if east_asian_width(letter) in "WF" else 1 for letter in words)


def _tenth(number: int) -> str:
    return "" if number % 10 else str(number)


def _words(name: str, max_letters: int = MAX_LETTERS) -> str:
    plain = "".join(letter if letter.isprintable() else " " for letter in name)
    return plain if len(plain) <= max_letters else f"{plain[: max_letters - 1]}…"


def _text(
    at: tuple[float, float], words: str, size: float, anchor: str = "start", colour: str = INK
) -> str:
    place = f'x="{at[0]:g}" y="{at[1]:g}" text-anchor="{anchor}"'
    return f'<text {place} font-size="{size:g}" fill="{colour}">{html.escape(words)}</text>'
