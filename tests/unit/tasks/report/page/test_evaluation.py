"""What a page shows of an evaluation: legible pictures, safe from any name, true to the numbers."""

import base64
import io
import random
import re
from xml.etree import ElementTree as ET

import numpy as np
import pytest
from PIL import Image

from prefect_torch_ddp.rank.evaluation.classification import classification_report as report
from prefect_torch_ddp.results import Report, WorstSample
from prefect_torch_ddp.tasks.report.page.evaluation import (
    class_table,
    confusion_table,
    texts,
    worst_samples,
)
from tests.support.pages import tables

SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = '"/><script>alert(1)</script>](http://evil)<image href="http://evil/x.png"/>&\n```|<b>'
UNIT = [[1, 0], [0, 1]]


def noisy(num: int) -> list[list[int]]:
    """Make a matrix in which every cell has samples."""
    draw = random.Random(0)
    return [[draw.randint(1, 9) + 90 * (i == j) for j in range(num)] for i in range(num)]


def picture(markdown: str) -> ET.Element:
    """Return the only picture of a page, parsed; nothing in it leads elsewhere."""
    (data,) = re.findall(r"!\[[a-z ]+\]\(data:image/svg\+xml;base64,([A-Za-z0-9+/=]+)\)", markdown)
    svg = ET.fromstring(base64.b64decode(data, validate=True))
    kinds = {element.tag.removeprefix(SVG) for element in svg.iter()}
    assert kinds <= {"svg", "style", "rect", "g", "text", "image"}
    images = ("data:image/png", "data:image/jpeg")
    for element in svg.iter():
        assert set(element.attrib).isdisjoint({"onload", "onclick", "xlink:href"})
        assert element.get("href", "data:image/png").startswith(images)
    return svg


def words(svg: ET.Element) -> list[str]:
    """Return what a reader sees written."""
    return [element.text for element in svg.iter(f"{SVG}text")]


def test_a_cells_colour_is_its_share_of_the_true_class() -> None:
    """Hits are blue and confusions red, by share and not by number; none is transparent."""
    svg = picture(confusion_table(report([[9000, 1000, 0], [1, 9, 0], [0, 0, 0]], "abc")))
    (image,) = svg.iter(f"{SVG}image")
    file = io.BytesIO(base64.b64decode(image.get("href").partition(",")[2]))
    cells = np.asarray(Image.open(file).convert("RGBA")).astype(int)  # [row, column, colour]
    assert cells[0, 2, 3] == 0
    assert (cells[2, :, 3] == 0).all(), "a class without samples"
    assert (cells[0, 0] == cells[1, 1]).all()
    assert (cells[0, 1] == cells[1, 0]).all()
    red, _green, blue, opacity = cells[0, 0]
    assert blue > red + 50
    assert opacity > 200
    red, _green, blue, opacity = cells[0, 1]
    assert red > blue + 20
    assert 50 < opacity < 150
    assert {"a", "b", "c", "9000", "1000", "9", "1"} <= set(words(svg))


@pytest.mark.parametrize("num", [1, 2, 10, 21, 60, 200])
def test_the_picture_is_legible_and_small(num: int) -> None:
    """All names up to 60 classes, in letters of 9 pixels at least and apart from each other;
    a page of 200 classes has room for it."""
    names = [f"class number {i:03}" for i in range(num)]
    page = report(noisy(num), names)
    shown = confusion_table(page)
    svg = picture(shown)
    sizes = [(e.text, float(e.get("font-size", 12))) for e in svg.iter(f"{SVG}text")]
    assert min(size for _, size in sizes) >= 7
    written = words(svg)
    if num <= 60:
        assert all(written.count(name) == 2 for name in names)
        (cells,) = svg.iter(f"{SVG}image")
        (size,) = {size for word, size in sizes if word in names}
        assert 9 <= size < float(cells.get("width")) / num
    else:
        assert {"10", "200"} <= set(written)
    assert float(svg.get("width")) < 900
    assert len((shown + class_table(page, page)).encode()) < 110_000
    assert "The most frequent confusions" in shown or num == 1


def test_counts_stand_only_where_they_can_be_read() -> None:
    """A count is shown if it fits its cell, and a long one is rounded."""
    million = report([[1_234_567, 1], [2, 3]], "ab")
    assert {"1235k", "1", "2", "3"} <= set(words(picture(confusion_table(million))))
    many = report(noisy(50), [f"c{i}" for i in range(50)])
    assert not any(word.isdigit() for word in words(picture(confusion_table(many))))


def test_the_difference_to_the_last_version_stands_by_each_class() -> None:
    """By name: the order and the set of classes may have changed."""
    matrix = [[4, 0, 0], [2, 2, 0], [0, 0, 1]]
    now, before = report(matrix, ("cat", "dog", "eel")), report(matrix, ("dog", "cat", "emu"))
    page = class_table(now, before)
    header, _rule, *rows = tables(page)[0]
    assert header == ["class", "precision", "recall", "F1", "F1 since the last run", "support"]
    changes = [(row[0], row[4]) for row in rows]
    assert changes == [("cat", "+0.133"), ("dog", "-0.133"), ("eel", "new")]
    assert "No longer there: emu." in page
    assert "last run" not in class_table(now)
    assert "No longer" not in class_table(now, now)


def sample(**fields) -> WorstSample:
    """Make a sample of a white pixel."""
    Image.new("L", (1, 1), 255).save(file := io.BytesIO(), "png")
    image = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    return WorstSample(**{"loss": 2.5, "true": "cat", "predicted": "dog", "image": image, **fields})


def test_the_worst_samples_stand_in_a_row_with_both_classes() -> None:
    """And their loss, which may have been no number."""
    samples = (sample(loss=None), sample(true="dog"))
    svg = picture(worst_samples(report(UNIT, "ab", worst_samples=samples)))
    assert words(svg) == ["cat", "→ dog", "loss nan or inf", "dog", "→ dog", "loss 2.5"]
    assert len(list(svg.iter(f"{SVG}image"))) == 2
    assert worst_samples(report(UNIT, "ab")) == ""


def test_no_name_puts_a_link_an_image_or_a_script_into_page_or_picture() -> None:
    """Names come from datasets, which anyone may have made."""
    worst = [sample(true=HOSTILE, predicted=HOSTILE)]
    found = report([[1, 2], [3, 4]], (HOSTILE, f"x{HOSTILE}"), worst_samples=worst)
    before = report(UNIT, (f"y{HOSTILE}", HOSTILE))
    for page in (confusion_table(found), worst_samples(found), class_table(found, before)):
        if "data:image" in page:
            shown = words(picture(page))
            assert any(word.startswith('"/><scr') for word in shown), "as plain text"
        data, block = r"!\[[a-z ]+\]\(data:[a-z+/;0-9]+,[A-Za-z0-9+/=]+\)", r"^(```+)text\n.*?\n\1$"
        plain = re.sub(data, "", re.sub(block, "", page, flags=re.DOTALL | re.MULTILINE))
        assert "<script" not in plain
        assert "<b>" not in plain
        assert not re.search(r"(?<!\\)\]\(", plain)


def test_texts_stand_below_their_titles_bounded_and_safe() -> None:
    """What a model generated keeps its lines, and nothing in it becomes markup."""
    found = Report(
        num_samples=1, texts={"A <b>poem</b>": "one\n# two\n\n<script>", "long": "x" * 4001}
    )
    page = texts(found)
    assert "**A &lt;b&gt;poem&lt;/b&gt;**\n\n> one  \n> " in page
    assert "<script>" not in page
    assert "\n# two" not in page
    assert page.endswith(f"> {'x' * 4000}  \n\n1 more characters are left out.")
    many = texts(Report(num_samples=1, texts={str(i): "x" for i in range(10)}))
    assert many.endswith("2 more texts are left out.")
    assert texts(Report(num_samples=1)) == ""
