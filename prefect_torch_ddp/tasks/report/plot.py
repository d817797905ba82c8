"""The picture of a training: its curves as one small SVG, inline in markdown."""

import base64
import io
import math
import re
import threading
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from prefect_torch_ddp.records.metrics import is_validation

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Curve = Sequence[tuple[float, float]]
"""(step, value) in order of step."""
Panels = Mapping[str, Mapping[str, Curve]]
"""Curves by name, by the panel's title."""

MAX_POINTS = 200
MAX_POINTS_IN_ALL = 400
MAX_CURVES_PER_PANEL = 4
MAX_EPOCH_MARKS = 12
MAX_POINTS_WITH_DOTS = 40
COLOURS = ("#1f6feb", "#d1495b", "#2a9d54", "#8a5cd1")
INK = "#24292f"
PALE = "#d0d7de"
NUM_COLUMNS = 2
PANEL_INCHES = (4.6, 2.7)
# Without the salt every picture has other ids; with parse_math a `$` in a metric's name would be
# read as a formula.
SETTINGS: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "curves",
    "font.size": 9.0,
    "text.parse_math": False,
}
NO_METADATA = {"Date": None, "Creator": None, "Format": None, "Type": None}
UNUSED_NAMES = (
    r' id="(figure|axes|patch|line2d|text|xtick|ytick|legend|matplotlib\.axis)_\d+"'
    r'| transform="rotate\(-0 [^"]*"'
)
REPEATED_STYLES = (
    r" font-family: [^;\"]*;|;? stroke-linecap: square|;? stroke-linejoin: miter"
    rf"|; fill: {INK}(?=\")"
)

_DRAWING = threading.Lock()


def render_curves(
    curves: Mapping[str, Curve], epoch_ends: Sequence[float] = (), caption: str = "training curves"
) -> str:
    """Return the curves as a markdown image with an SVG data URI; an empty string without any.

    Args:
        curves: by metric; nan and infinite values are left out. Losses, other metrics and
            validation metrics get a panel each.
        epoch_ends: last step of each epoch, marked by a thin line.
        caption: what a page shows instead of the picture; plain words.
    """
    svg = curves_svg(curves, epoch_ends)
    data = base64.b64encode(svg.encode()).decode()
    return f"![{caption}](data:image/svg+xml;base64,{data})" if svg else ""


def curves_svg(curves: Mapping[str, Curve], epoch_ends: Sequence[float] = ()) -> str:
    """Return the curves as an SVG document, or an empty string without any."""
    finite = {
        name: [(x, y) for x, y in curve if math.isfinite(x) and math.isfinite(y)]
        for name, curve in curves.items()
    }
    panels = _panels({name: curve for name, curve in finite.items() if curve})
    if not panels:
        return ""
    num_points = min(MAX_POINTS, MAX_POINTS_IN_ALL // sum(len(panel) for panel in panels.values()))
    thin = {
        title: {name: downsample(curve, num_points) for name, curve in panel.items()}
        for title, panel in panels.items()
    }
    return _shrink(_draw(thin, epoch_ends))


def downsample(curve: Curve, max_points: int = MAX_POINTS) -> list[tuple[float, float]]:
    """Keep the first and the last point, and the mean of each stretch between them."""
    if len(curve) <= max_points:
        return list(curve)
    inner, num_stretches = curve[1:-1], max(1, max_points - 2)
    bounds = [round(i * len(inner) / num_stretches) for i in range(num_stretches + 1)]
    stretches = [inner[start:end] for start, end in pairwise(bounds) if end > start]
    means = [
        (math.fsum(x for x, _ in part) / len(part), math.fsum(y for _, y in part) / len(part))
        for part in stretches
    ]
    return [curve[0], *means, curve[-1]]


def _panels(curves: Mapping[str, Curve]) -> Panels:
    titles = ("training loss", "validation loss", "training", "validation")
    panels: dict[str, dict[str, Curve]] = {title: {} for title in titles}
    for name, curve in curves.items():
        title = "validation" if is_validation(name) else "training"
        panel = panels[f"{title} loss" if "loss" in name.lower() else title]
        if len(panel) < MAX_CURVES_PER_PANEL:
            panel[name] = curve
    return {title: panel for title, panel in panels.items() if panel}


def _draw(panels: Panels, epoch_ends: Sequence[float]) -> str:
    # Never pyplot: it keeps every figure forever, and isn't safe in the threads of tasks.
    import matplotlib as mpl  # noqa: PLC0415 - half a second, paid by the processes that draw
    from matplotlib.figure import Figure  # noqa: PLC0415

    num_columns = min(NUM_COLUMNS, len(panels))
    num_rows = math.ceil(len(panels) / num_columns)
    size = (PANEL_INCHES[0] * num_columns, PANEL_INCHES[1] * num_rows)
    # rc_context changes the whole process: of two threads in it, one would leave its settings.
    with _DRAWING, mpl.rc_context(SETTINGS):
        figure = Figure(size, facecolor="white", layout="tight")
        cells = list(figure.subplots(num_rows, num_columns, squeeze=False).flat)
        for axes, (title, panel) in zip(cells, panels.items(), strict=False):
            _fill(axes, title, panel)
        for axes in cells[len(panels) :]:
            axes.remove()
        _share_steps(cells[: len(panels)], epoch_ends)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata=NO_METADATA)
    return text.getvalue()


def _fill(axes: "Axes", title: str, panel: Mapping[str, Curve]) -> None:
    from matplotlib.ticker import MaxNLocator  # noqa: PLC0415

    # Curves whose names begin with an underscore are left out of matplotlib's legends.
    names = [name.lstrip("_") or "metric" for name in panel]
    line: dict[str, Any] = {"linewidth": 1.4, "markersize": 4, "clip_on": False}
    for colour, name, curve in zip(COLOURS, names, panel.values(), strict=False):
        dots = "." if len(curve) <= MAX_POINTS_WITH_DOTS else None
        axes.plot(*zip(*curve, strict=True), color=colour, label=name, marker=dots, **line)
    axes.set_title(names[0] if len(names) == 1 else title, color=INK, fontsize=9)
    axes.set_xlabel("step", color=INK)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=4, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=4))
    axes.ticklabel_format(useOffset=False)
    axes.tick_params(colors=INK, length=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(PALE)
    if len(names) > 1:
        axes.legend(frameon=False, fontsize=8, labelcolor=INK)


def _share_steps(all_axes: Sequence["Axes"], epoch_ends: Sequence[float]) -> None:
    start = min(axes.get_xlim()[0] for axes in all_axes)
    end = max(axes.get_xlim()[1] for axes in all_axes)
    shown = [epoch_end for epoch_end in epoch_ends if start < epoch_end < end]
    stride = math.ceil(len(shown) / MAX_EPOCH_MARKS)  # marks of all would make a grey wall
    marks = shown[stride - 1 :: stride] if stride else []
    # One path for all marks: twelve lines would cost 2 kB.
    x, y = [at for mark in marks for at in (mark, mark, mark)], [0, 1, math.nan] * len(marks)
    for axes in all_axes:
        across = axes.get_xaxis_transform()
        axes.plot(x, y, color=PALE, linewidth=0.8, transform=across, zorder=0, clip_on=False)
        axes.set_xlim(start, end)


def _shrink(svg: str) -> str:
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<!--.*?-->|<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"\s*\n\s*", " ", svg)
    # Digits are cut inside tags alone: between them stand the axes' labels.
    svg = re.sub(r"<[^>]*>", lambda tag: re.sub(r"(?<=\d\.\d)\d+", "", tag[0]), svg)
    svg = re.sub(UNUSED_NAMES, "", svg)
    svg = re.sub(REPEATED_STYLES, "", svg)
    style = f" text{{font-family: DejaVu Sans, sans-serif; fill: {INK}}}</style>"
    svg = svg.replace("</style>", style, 1)
    return re.sub(r"<g\s*/>", "", re.sub(r">\s+<", "><", svg)).strip()
