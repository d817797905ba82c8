"""The picture of a training: small, self-contained, legible, deterministic."""

import base64
import math
import re
from xml.etree import ElementTree as ET

import pytest

from prefect_torch_ddp.tasks.report.curves import Curves
from prefect_torch_ddp.tasks.report.page.plot import (
    COLOURS,
    HEIGHT,
    MAX_PANELS,
    MAX_POINTS,
    PALE,
    RESUMED,
    WIDTH,
    downsample,
    left_out,
    render_curves,
)

LOSS = [
    (step, 2.3 * math.exp(-step / 300) + 0.05 * math.sin(step * 12.9898)) for step in range(1, 1501)
]
VALIDATION = [(150 * epoch, 1 - 0.5 * math.exp(-epoch / 3)) for epoch in range(1, 11)]
EPOCH_ENDS = [150 * epoch for epoch in range(1, 10)]
SVG = "{http://www.w3.org/2000/svg}"


def source(values, epoch_ends=(), **more) -> str:
    """Draw curves; return the SVGs of the markdown images, in one element."""
    markdown = render_curves(Curves(values, epoch_ends, **more))
    image = r"!\[training curves\]\(data:image/svg\+xml;base64,([A-Za-z0-9+/=]+)\)"
    found = [re.fullmatch(image, line)[1] for line in markdown.splitlines()]
    return "".join(["<all>", *(base64.b64decode(each).decode() for each in found), "</all>"])


def drawn(*curves, **more) -> ET.Element:
    """Draw curves; return the SVGs, parsed."""
    return ET.fromstring(source(*curves, **more))


def texts(svg: ET.Element) -> list[str]:
    """Return what a reader sees written."""
    return [element.text for element in svg.iter(f"{SVG}text")]


def lines(svg: ET.Element, colour: str) -> list[str]:
    """Return the lines of a colour, as paths."""
    return [path.get("d") for path in svg.iter(f"{SVG}path") if path.get("stroke") == colour]


def titles(svgs: ET.Element) -> list[str]:
    """Return what stands above each panel; all have the same size."""
    assert {svg.get("viewBox") for svg in svgs} <= {f"0 0 {WIDTH} {HEIGHT}"}
    return [next(svg.iter(f"{SVG}text")).text for svg in svgs]


def points_of(svg: ET.Element, colour: str = COLOURS[0]) -> list[tuple[float, float]]:
    """Return the points of the first line of a colour, in pixels; none outside of the picture."""
    found = re.findall(r"[ML]([\d.]+),([\d.]+)", lines(svg, colour)[0])
    points = [(float(x), float(y)) for x, y in found]
    assert all(0 <= x <= WIDTH and 0 <= y <= HEIGHT for x, y in points)
    return points


def test_a_report_sized_picture_is_an_inline_svg_image_below_12_kb() -> None:
    """The same each time, without a background, in words of two colours, and no network."""
    values = {"loss": LOSS, "validation_accuracy": VALIDATION}
    markdown = render_curves(Curves(values, EPOCH_ENDS))
    assert len(markdown) < 12_000
    assert markdown == render_curves(Curves(values, EPOCH_ENDS))
    svg = drawn(values, EPOCH_ENDS)
    assert {*values, "step"} <= set(texts(svg))
    assert "http" not in source(values, EPOCH_ENDS).replace('xmlns="http', "")
    for one in svg:
        assert one.get("fill") == "currentColor"
        assert "prefers-color-scheme:dark" in next(one.iter(f"{SVG}style")).text
        assert not list(one.iter(f"{SVG}rect"))
    assert not any(text.get("fill") for text in svg.iter(f"{SVG}text"))


def test_a_curve_goes_where_its_values_say() -> None:
    """Steps to the right, larger values up, in proportion; the ticks say which."""
    (x0, y0), (x1, y1), (x2, y2) = points_of(drawn({"loss": [(0, 4.0), (50, 2.0), (100, 1.0)]}))
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2)
    assert y1 - y0 == pytest.approx(2 * (y2 - y1), abs=0.3)
    assert {"1", "2", "3", "4", "0", "100"} <= set(
        texts(drawn({"loss": [(0, 4), (50, 2), (100, 1)]}))
    )


def test_curves_of_one_quantity_share_a_panel_with_a_legend() -> None:
    """Training and validation share a panel, and other quantities have theirs."""
    assert titles(drawn({"loss": LOSS, "accuracy": VALIDATION})) == ["loss", "accuracy"]
    shared = drawn({"train/loss": LOSS, "val_loss": VALIDATION})
    assert titles(shared) == ["loss"]
    assert {"loss", "train/loss", "val_loss"} <= set(texts(shared))
    assert points_of(shared, COLOURS[1])
    long = texts(drawn({"loss_of_" + "x" * 50 + "_9": LOSS}))
    assert any(re.fullmatch(r"loss_of_x+….*_9", name) for name in long)
    odd = texts(drawn(dict.fromkeys(["_hidden", "$x$ & <b>", "a\x00b"], LOSS[:5])))
    assert {"_hidden", "$x$ & <b>", "ab"} <= set(odd)


def test_what_has_no_room_is_named() -> None:
    """Each curve is drawn or named; the rates that ranks measured have a place in any case."""
    names = [f"metric {i}" for i in range(30)] + [f"val_{i}_loss" for i in range(3)]
    names += [f"{split}_top" for split in ("train", "val", "test", "eval", "valid")]
    measured = ["learning_rate", "samples/s"]
    values = dict.fromkeys([*names, *measured], LOSS[:9])
    without, shown = left_out(Curves(values)), texts(drawn(values))
    assert [name for name in shown if name in values] == [
        *[name for name in names if name.endswith("loss")],
        *[f"metric {i}" for i in range(MAX_PANELS - 5)],
        *measured,
    ]
    assert set(without) | set(shown) >= values.keys()
    assert not set(without) & set(shown)
    assert left_out(Curves({"loss": LOSS})) == []


def test_attempts_that_resumed_are_marked() -> None:
    """Each panel has a line where an attempt began, without overlapping words."""
    values = {"loss": LOSS, "accuracy": VALIDATION}
    svg = drawn(values, resumes={2: 400, 3: 410, 4: 1200, 5: 9999})
    assert len(lines(svg, RESUMED)) == 6
    assert [words for words in texts(svg) if "attempt" in words] == 2 * ["attempt 2", "attempt 4"]


@pytest.mark.parametrize(
    ("ends", "fewest", "most"), [(EPOCH_ENDS, 9, 9), (range(10, 1500, 10), 6, 12), ([1500], 0, 0)]
)
def test_epochs_are_marked_and_many_make_no_wall(ends, fewest: int, most: int) -> None:
    """Many epochs have a mark only every so often, and none at the picture's end."""
    marks = lines(drawn({"loss": LOSS}, list(ends)), PALE)[1:]
    assert fewest <= sum(path.count("M") for path in marks) <= most


@pytest.mark.parametrize("hole", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_left_out(hole: float) -> None:
    """A curve of nothing else is no curve; without any there is no picture."""
    values = {"loss": [(1, 1.0), (2, hole), (3, 0.5), (4, 0.25)], "lr": [(1, hole)]}
    svg = drawn(values)
    assert len(points_of(svg)) == 3
    assert "lr" not in texts(svg)
    assert not re.search(r"\b(nan|inf)\b", source(values), re.IGNORECASE)
    assert not any(
        render_curves(Curves(none)) for none in ({}, {"loss": []}, {"loss": [(1, hole)]})
    )


@pytest.mark.parametrize(
    "values",
    [
        [1e300, -1e300, 1e-300],
        [1.7e308, -1.7e308, 0.0],
        [0.0, 5e-324, 0.0],
        [1e-12, 2e-12, 1e-12],
        [1e9, 1e9 + 1, 1e9],
        [0.90, 0.91, 0.98],
    ],
)
def test_any_finite_values_are_drawn(values: list[float]) -> None:
    """Huge, tiny and close values have few ticks, all different."""
    svg = drawn({"loss": list(enumerate(values))})
    assert len(points_of(svg)) == len(values)
    ticks = [text for text in texts(svg) if text not in ("loss", "step")]
    assert 2 <= len(ticks) <= 14
    assert len(set(ticks)) >= len(ticks) - 1  # a step may read like a value


def test_downsampling_keeps_the_order_and_the_mean() -> None:
    """A short curve stays as it is."""
    curve = LOSS[: 12 * MAX_POINTS]
    thin = downsample(curve)
    assert len(thin) == len(points_of(drawn({"loss": curve}))) == MAX_POINTS
    assert [x for x, _ in thin] == sorted({x for x, _ in thin})
    whole = math.fsum(y for _, y in curve) / len(curve)
    assert math.fsum(y for _, y in thin) / len(thin) == pytest.approx(whole)
    assert downsample(LOSS[:MAX_POINTS]) == LOSS[:MAX_POINTS]


@pytest.mark.parametrize(
    "curve",
    [[(1, 0.5), (2, 0.25)], [(step, 0.001) for step in range(1, 100)]],
    ids=["of two points", "constant"],
)
def test_what_its_last_value_says_has_no_panel(curve: list[tuple[int, float]]) -> None:
    """Nor is it named as left out: it is in the table. Beside one that says more it is shown."""
    assert render_curves(Curves({"lr": curve})) == ""
    assert left_out(Curves({"lr": curve})) == []
    assert titles(drawn({"lr": curve, "loss": LOSS})) == ["loss"]
    assert {"loss", "val_loss"} <= set(texts(drawn({"val_loss": curve, "loss": LOSS})))
