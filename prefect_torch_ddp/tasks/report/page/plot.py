"""The picture of a training: its curves as one small SVG, inline in markdown.

Written out, not drawn by a library: that would take a second of a core to load and a tenth for
each picture, next to ranks that train.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from prefect_torch_ddp.protocol.metric_names import quantity
from prefect_torch_ddp.tasks.report.curves import Curve, Curves
from prefect_torch_ddp.tasks.report.markdown import middle_cut, svg_image, svg_text

Panel = Mapping[str, Curve]

MIN_POINTS = 3
MAX_POINTS = 120
"""Of a curve; of 48 curves they are 80 kB of a page."""
MAX_PALE_POINTS = 40
"""Of a curve among up to 200 of a sweep."""
MAX_CURVES_PER_PANEL = 4
MEASURED_PANELS = ("learning rate", "samples/s")
MAX_PANELS = 12
MIN_APART = 60
"""Pixels between two words at marks."""
MAX_EPOCH_MARKS = 12
MAX_POINTS_WITH_DOTS = 40
MAX_NAME = 26
COLOURS = ("#2f7cf0", "#d1495b", "#2a9d54", "#9a6ae0")
"""Of the curves; they can be seen on a light page and on a dark one."""
PALE = "#8c959f"
PALENESS = 0.45
RESUMED = "#bf8700"
WIDTH, HEIGHT = 440, 260
"""Of a panel, in pixels."""
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 34, 46
"""What is left around its plot."""
LINE = 15
GAP = 5
NUM_TICKS = 5
LARGEST, SMALLEST = 1e300, 1e-300
"""Beyond them sums and quotients overflow."""
FIXED_FROM, FIXED_TO = 1e-4, 1e6
"""Ticks that are written without an exponent."""


def render_curves(curves: Curves) -> str:
    """Return the curves as markdown images with SVG data URIs; an empty string without any.

    Each quantity gets a panel, training and validation together, unless none of them has
    `MIN_POINTS` points that differ. Panels are separate images, so that a phone shows one in a
    row and a wide page several. Thin lines mark the ends of epochs, dashed ones where an attempt
    resumed. `left_out` says which curves there is no room for.
    """
    panels, _ = _panels(curves)
    if not panels:
        return ""
    steps = [step for panel in panels.values() for curve in panel.values() for step, _ in curve]
    axis = _Axis.over(steps, LEFT + GAP, WIDTH - RIGHT)
    marks = _marks(curves, axis)
    images = []
    for title, panel in panels.items():
        thin = {name: downsample(curve) for name, curve in panel.items()}
        drawn = _draw(title, thin, axis, marks)
        images.append(svg_image("training curves", WIDTH, HEIGHT, [drawn]))
    return "\n".join(images)


def render_together(title: str, named: Panel, others: Sequence[Curve]) -> str:
    """Return one panel with the curves of several runs; an empty string if they are too short.

    Args:
        title: what the curves show.
        named: curves by their runs' names, in colours; at most as many as there are `COLOURS`.
        others: shown pale, without a name.
    """
    thin = {name: downsample(curve) for name, curve in named.items() if _tells(curve)}
    pale = [downsample(curve, MAX_PALE_POINTS) for curve in others if _tells(curve)]
    if not thin:
        return ""
    steps = [step for curve in (*thin.values(), *pale) for step, _ in curve]
    axis = _Axis.over(steps, LEFT + GAP, WIDTH - RIGHT)
    return svg_image(title, WIDTH, HEIGHT, [_draw(title, thin, axis, (), pale)])


def downsample(curve: Curve, max_points: int = MAX_POINTS) -> Curve:
    """Return a curve, or if it has more points the mean of each of so many stretches."""
    if len(curve) <= max_points:
        return curve
    parts = np.array_split(np.asarray(curve), max_points)
    return [(float(step), float(value)) for step, value in (part.mean(axis=0) for part in parts)]


def left_out(curves: Curves) -> list[str]:
    """Return the names of the curves that the picture has no room for."""
    return _panels(curves)[1]


def _panels(curves: Curves) -> tuple[Mapping[str, Panel], list[str]]:
    """Return the curves by panel, and the names of those that there is no room for."""
    found: dict[str, dict[str, Curve]] = {}
    # Losses come first, what ranks measured themselves comes last anyway.
    for name in sorted(curves.values, key=lambda name: "loss" not in name.lower()):
        curve = [
            (step, max(-LARGEST, min(LARGEST, value)))
            for step, value in curves.values[name]
            if math.isfinite(step) and math.isfinite(value)
        ]
        if curve:
            found.setdefault(quantity(name), {})[name] = curve
    panels: dict[str, Panel] = {}
    left_out: list[str] = []
    for title, panel in found.items():
        most = MAX_PANELS if title in MEASURED_PANELS else MAX_PANELS - len(MEASURED_PANELS)
        if not any(map(_tells, panel.values())):
            continue
        names = list(panel)[: MAX_CURVES_PER_PANEL if len(panels) < most else 0]
        left_out += [name for name in panel if name not in names]
        if names:
            panels[title] = {name: panel[name] for name in names}
    return panels, left_out


def _tells(curve: Curve) -> bool:
    """Whether a curve shows more than its last value does."""
    return len(curve) >= MIN_POINTS and len({value for _, value in curve}) > 1


def _marks(curves: Curves, steps: "_Axis") -> Sequence[tuple[str, str]]:
    """Return where lines stand and what is written there; nothing at the end of an epoch."""
    shown = [step for step in curves.epoch_ends if steps.low < step < steps.high]
    stride = max(1, math.ceil(len(shown) / MAX_EPOCH_MARKS))  # marks of all would make a grey wall
    ends = [(steps.at(step), "") for step in shown[stride - 1 :: stride]]
    resumes = list(curves.resumes.items())[-MAX_EPOCH_MARKS:]
    within = [(number, step) for number, step in resumes if steps.low <= step <= steps.high]
    return ends + [(steps.at(step), f"attempt {number}") for number, step in within]


@dataclass(frozen=True)
class _Axis:
    """Values from `low` to `high`, drawn from pixel `start` to pixel `end`."""

    low: float
    high: float
    start: float
    end: float

    @classmethod
    def over(cls, values: Sequence[float], start: float, end: float) -> "_Axis":
        low, high = min(values), max(values)
        size = max(abs(low), abs(high))
        if high - low <= max(size * 1e-9, SMALLEST):
            around = size / 10 if size > SMALLEST else 1.0
            low, high = low - around, high + around
        return cls(low, high, start, end)

    def at(self, value: float) -> str:
        share = (value - self.low) / (self.high - self.low)
        return f"{self.start + share * (self.end - self.start):.1f}"

    def ticks(self, finest: float = SMALLEST) -> dict[str, str]:
        """Round values and their pixels, by what is written there."""
        rough = max((self.high - self.low) / NUM_TICKS, finest)
        power = 10.0 ** math.floor(math.log10(rough))
        apart = power * next(times for times in (1, 2, 5, 10) if power * times >= rough * 0.999)
        first, last = math.ceil(self.low / apart), math.floor(self.high / apart)
        size = max(abs(first), abs(last), 1) * apart
        digits = max(0, math.ceil(-math.log10(apart) - 1e-9))
        shape = f".{digits}f" if apart >= FIXED_FROM and size < FIXED_TO else ".6g"
        return {f"{i * apart:{shape}}": self.at(i * apart) for i in range(first, last + 1)}


def _draw(
    title: str,
    panel: Panel,
    steps: _Axis,
    marks: Sequence[tuple[str, str]],
    pale: Sequence[Curve] = (),
) -> str:
    top = TOP + (LINE * math.ceil(len(panel) / 2) if len(panel) > 1 else 0)
    bottom = HEIGHT - BOTTOM
    drawn = (*panel.values(), *pale)
    values = _Axis.over([y for curve in drawn for _, y in curve], bottom - GAP, top)
    heading = title if len(panel) > 1 else next(iter(panel))
    parts = [
        _text(WIDTH / 2, 20, heading),
        _text(WIDTH / 2, HEIGHT - 10, "step"),
        *(_text(x, bottom + 17, label) for label, x in steps.ticks(finest=1).items()),
        *(
            _text(LEFT - 6, float(y) + 4, label, anchor="end")
            for label, y in values.ticks().items()
        ),
        _line(f"M{LEFT},{top}V{bottom}H{WIDTH - RIGHT}", PALE),
    ]
    if ends := "".join(f"M{x},{top}V{bottom}" for x, words in marks if not words):
        parts.append(_line(ends, PALE))
    last_x = -math.inf
    for mark, words in marks:
        if words:
            parts.append(_line(f"M{mark},{top}V{bottom}", RESUMED, dashed=True))
            if float(mark) - last_x >= MIN_APART:
                last_x = float(mark)
                anchor = "start" if last_x < WIDTH - RIGHT - MIN_APART else "end"
                parts.append(_text(mark, bottom - 4, words, anchor=anchor, colour=RESUMED))
    parts += [_line("M" + "L".join(_points(curve, steps, values)), PALE) for curve in pale]
    for i, (colour, (name, curve)) in enumerate(zip(COLOURS, panel.items(), strict=False)):
        points = _points(curve, steps, values)
        parts.append(_line("M" + "L".join(points), colour, width=1.8))
        if len(points) <= MAX_POINTS_WITH_DOTS:
            parts.append(_line("".join(f"M{point}h0" for point in points), colour, width=5))
        if len(panel) > 1:
            x, y = LEFT + i % 2 * (WIDTH - LEFT) / 2, TOP + LINE * (i // 2)
            parts.append(_text(x, y, name, anchor="start", colour=colour))
    return "".join(parts)


def _points(curve: Curve, steps: _Axis, values: _Axis) -> list[str]:
    return [f"{steps.at(x)},{values.at(y)}" for x, y in curve]


def _line(path: str, colour: str, width: float = 1.0, *, dashed: bool = False) -> str:
    round_ = ' stroke-dasharray="4 3"' if dashed else ""
    round_ += ' stroke-linecap="round" stroke-linejoin="round"' if width > 1 else ""
    round_ += f' stroke-opacity="{PALENESS}"' if colour == PALE else ""
    return f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="{width:g}"{round_}/>'


def _text(x: float | str, y: float, words: str, *, anchor: str = "middle", colour: str = "") -> str:
    look = f'fill="{colour}"' if colour else ""
    return svg_text(x, y, middle_cut(words, MAX_NAME), look, anchor)
