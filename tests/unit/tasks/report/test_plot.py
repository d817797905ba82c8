"""The picture of a training: small, self-contained, legible, deterministic."""

import base64
import math
import re
import threading
from xml.etree import ElementTree as ET

import pytest

from prefect_torch_ddp.tasks.report.plot import MAX_POINTS, curves_svg, downsample, render_curves

LOSS = [
    (step, 2.3 * math.exp(-step / 300) + 0.05 * math.sin(step * 12.9898)) for step in range(1, 1501)
]
VALIDATION = [(150 * epoch, 1 - 0.5 * math.exp(-epoch / 3)) for epoch in range(1, 11)]
EPOCH_ENDS = [150 * epoch for epoch in range(1, 11)]
SVG = "{http://www.w3.org/2000/svg}"


def texts(svg: str) -> list[str]:
    """Return what a reader sees written."""
    return [element.text for element in ET.fromstring(svg).iter(f"{SVG}text")]


def longest_path(svg: str) -> int:
    """Return how many points the longest line has."""
    return max(
        len(re.findall("[ML]", element.get("d", "")))
        for element in ET.fromstring(svg).iter(f"{SVG}path")
    )


def test_a_report_sized_picture_is_an_inline_svg_image_below_12_kb():
    """And it needs no network."""
    markdown = render_curves({"loss": LOSS, "validation_accuracy": VALIDATION}, EPOCH_ENDS)
    assert len(markdown) < 12_000
    data = re.fullmatch(
        r"!\[training curves\]\(data:image/svg\+xml;base64,([A-Za-z0-9+/=]+)\)", markdown
    )
    assert data
    svg = base64.b64decode(data[1]).decode()
    assert {"loss", "validation_accuracy", "step"} <= set(texts(svg))
    assert "http" not in re.sub(r'xmlns(:\w+)?="[^"]*"', "", svg), (
        "a page without a network must show it"
    )


def test_the_whole_picture_has_an_opaque_white_background():
    """Also in a dark page."""
    root = ET.fromstring(curves_svg({"loss": LOSS}))
    first = next(root.iter(f"{SVG}path"))
    width, height = root.get("viewBox").split()[2:]
    assert first.get("style") == "fill: #ffffff"
    assert f"L {width} {height}" in first.get("d")


def test_validation_has_a_panel_of_its_own_and_two_curves_of_one_scale_share_one_with_a_legend():
    """Validation has a panel of its own and two curves of one scale share one with a legend."""
    one = ET.fromstring(curves_svg({"loss": LOSS}))
    two = ET.fromstring(curves_svg({"loss": LOSS, "validation_accuracy": VALIDATION}))
    assert float(two.get("viewBox").split()[2]) == 2 * float(one.get("viewBox").split()[2])
    shared = curves_svg({"loss": LOSS, "loss_aux": LOSS})
    assert {"training loss", "loss", "loss_aux"} <= set(texts(shared))
    assert ET.fromstring(shared).get("viewBox") == one.get("viewBox")


def test_the_same_curves_give_the_same_bytes():
    """The same curves give the same bytes."""
    assert curves_svg({"loss": LOSS}, EPOCH_ENDS) == curves_svg({"loss": LOSS}, EPOCH_ENDS)
    assert "date" not in curves_svg({"loss": LOSS}).lower()


def test_epochs_are_marked_and_many_epochs_do_not_make_a_wall():
    """Epochs are marked and many epochs do not make a wall."""

    def num_marks(ends) -> int:
        paths = ET.fromstring(curves_svg({"loss": LOSS}, ends)).iter(f"{SVG}path")
        marks = [
            path for path in paths if "#d0d7de" in path.get("style", "") and "M" in path.get("d")
        ]
        return max(path.get("d").count("M") for path in marks)

    assert num_marks(EPOCH_ENDS) == 10
    assert 6 <= num_marks(list(range(10, 1500, 10))) <= 12


@pytest.mark.parametrize("hole", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_left_out(hole):
    """What is not finite is left out."""
    svg = curves_svg({"loss": [(1, 1.0), (2, hole), (3, 0.5)], "lr": [(1, hole)]})
    assert longest_path(svg) >= 2
    assert "lr" not in texts(svg)
    assert not re.search(r"\b(nan|inf)\b", svg, re.IGNORECASE)


@pytest.mark.parametrize("nothing", [{}, {"loss": []}, {"loss": [(1, math.nan)]}])
def test_nothing_to_draw_is_an_empty_text(nothing):
    """Nothing to draw is an empty text."""
    assert render_curves(nothing) == ""


def test_a_single_point_and_huge_and_tiny_values_are_drawn():
    """A single point and huge and tiny values are drawn."""
    assert "<use" in curves_svg({"loss": [(7, 0.25)]})
    assert longest_path(curves_svg({"loss": [(1, 1e300), (2, -1e300), (3, 1e-300)]})) >= 3


def test_names_that_matplotlib_or_xml_would_read_their_way_are_shown():
    """Names that matplotlib or xml would read their way are shown."""
    names = ["_hidden", "$x$ & <b>", "$"]
    assert {"hidden", "$x$ & <b>", "$"} <= set(texts(curves_svg(dict.fromkeys(names, LOSS[:5]))))


def test_downsampling_keeps_the_ends_the_order_and_the_mean():
    """Downsampling keeps the ends the order and the mean."""
    thin = downsample(LOSS)
    assert len(thin) == MAX_POINTS
    assert (thin[0], thin[-1]) == (LOSS[0], LOSS[-1])
    assert [x for x, _ in thin] == sorted({x for x, _ in thin})
    inner = [y for _, y in LOSS[1:-1]]
    assert math.fsum(y for _, y in thin[1:-1]) / (len(thin) - 2) == pytest.approx(
        math.fsum(inner) / len(inner), abs=0.01
    )
    assert downsample(LOSS[:200]) == LOSS[:200]
    assert longest_path(curves_svg({"loss": LOSS})) <= MAX_POINTS


def test_threads_that_draw_at_once_do_not_disturb_each_other():
    """Threads that draw at once do not disturb each other."""
    expected = curves_svg({"loss": LOSS})
    drawn = []
    threads = [
        threading.Thread(target=lambda: drawn.append(curves_svg({"loss": LOSS}))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    assert drawn == [expected] * 4


def test_axis_labels_keep_their_digits() -> None:
    """Shrinking the SVG cuts coordinates, never what people read: ticks 0.02 apart stay
    apart."""
    svg = curves_svg({"accuracy": [(step, 0.90 + step / 100) for step in range(9)]})
    labels = [text for text in re.findall(r"<text[^>]*>([^<]*)<", svg) if text.startswith("0.9")]
    assert len(labels) >= 3
    assert len(set(labels)) == len(labels)
