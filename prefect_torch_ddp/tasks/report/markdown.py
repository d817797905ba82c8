"""Values as markdown and SVG: escaped names, rounded numbers, tables, code, images."""

import base64
import html
import math
import re
from collections.abc import Iterable, Mapping, Sequence

MAX_NAME = 60
JOINER = "\u2060"
_COLOURS = "svg{color:#59636e}@media(prefers-color-scheme:dark){svg{color:#9198a1}}"


def text(value: object) -> str:
    """Escape a name: nothing in it starts a cell, code, emphasis, a link or an HTML tag.

    Markdown makes links of addresses by themselves, escaped or not: an invisible joiner parts them.
    """
    escaped = html.escape(" ".join(str(value).split()), quote=False)
    escaped = re.sub(r"([\\`*\[\]|~])", r"\\\1", escaped)
    escaped = re.sub(
        r"(?i)(?<=www)(?=\.)|(?<=:)(?=//)|(?<=@)|(?<=mailto:)|(?<=xmpp:)", JOINER, escaped
    )
    # At a line's beginning these make a heading, a list or a rule.
    escaped = re.sub(r"^(?=#|[-+=](?:\s|$|[-=])|\d{1,9}[.)](?:\s|$))", JOINER, escaped)
    # An underscore between letters starts nothing, and validation_loss stays searchable.
    return re.sub(r"(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])", r"\\_", escaped)


def short(value: object) -> str:
    """Escape a name, its middle left out if it is long: it would push a table off the page."""
    return text(middle_cut(" ".join(str(value).split()), MAX_NAME))


def code(value: object) -> str:
    """Show an identifier or a location as a code span that may stand in a table."""
    plain = " ".join(str(value).split()).replace("|", "\\|")
    if not plain:
        return ""
    fence = "`" * (_longest_backticks(plain) + 1)
    pad = " " if plain[0] == "`" or plain[-1] == "`" else ""
    return f"{fence}{pad}{plain}{pad}{fence}"


def code_block(source: str, language: str = "python") -> str:
    """Fence a piece of source so that nothing in it can end the fence."""
    fence = "`" * max(3, _longest_backticks(source) + 1)
    return f"{fence}{language}\n{source}\n{fence}"


def table(header: Sequence[str], rows: Iterable[Sequence[str]], *, align: str = "") -> str:
    """Lay out cells that are markdown already.

    Args:
        header: one cell per column.
        rows: cells, as many as the header has.
        align: a letter per column, `l` or `r`; by default `lrr...`.
    """
    align = align or "l" + "r" * (len(header) - 1)
    rule = ["---:" if letter == "r" else ":---" for letter in align]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, rule, *rows))


def fact_table(facts: Mapping[str, str]) -> str:
    """Lay out names and values that are markdown already; empty values are left out."""
    rows = [[name, value] for name, value in facts.items() if value]
    return table(["what", "value"], rows, align="ll")


def join(*parts: str) -> str:
    """Put the parts of a page together, those that are empty left out."""
    return "\n\n".join(part for part in parts if part) + "\n"


def number(value: float) -> str:
    """Round to four significant digits; nan and inf are words."""
    if not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    return str(value) if isinstance(value, int) else f"{value:.4g}"


def count(value: int) -> str:
    """Group the digits of a count."""
    return f"{value:,}"


def size(num_bytes: float) -> str:
    """Show a number of bytes: `512 bytes`, `3.4 MB`."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if num_bytes < 999.5:  # noqa: PLR2004 - from there on three digits show 1e+03
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:,.3g} TB"


def percent(share: float, num_digits: int = 2) -> str:
    """Show a share of one in percent."""
    return f"{100 * share:.{num_digits}f} %" if math.isfinite(share) else number(share)


def duration(seconds: float) -> str:
    """Show seconds as a person says them: `0.4 s`, `40 s`, `3 min 20 s`, `2 h 5 min`."""
    if not math.isfinite(seconds):
        return number(seconds)
    if seconds < 10:  # noqa: PLR2004
        return f"{seconds:.1f} s"
    minutes, rest_s = divmod(round(seconds), 60)
    hours, rest_min = divmod(minutes, 60)
    if hours:
        return f"{hours} h {rest_min} min"
    return f"{minutes} min {rest_s} s" if minutes else f"{rest_s} s"


def svg_image(caption: str, width: float, height: float, drawn: Iterable[str]) -> str:
    """Return a markdown image of SVG elements, without a background: it suits any page.

    Words have the colour of a light or a dark page. Each can be read on the other too, since a
    page may have another scheme than the system whose scheme a picture is given.
    """
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}"'
        f' viewBox="0 0 {width:g} {height:g}" font-family="sans-serif" font-size="12"'
        f' fill="currentColor"><style>{_COLOURS}</style>{"".join(drawn)}</svg>'
    )
    return (
        f"![{text(caption)}](data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()})"
    )


def svg_text(x: float | str, y: float, words: str, look: str = "", anchor: str = "middle") -> str:
    """Return the SVG element of some words; `look` has more of its attributes."""
    plain = html.escape("".join(letter for letter in words if letter.isprintable()))
    return f'<text x="{x}" y="{y:g}" text-anchor="{anchor}" {look}>{plain}</text>'


def middle_cut(name: str, most: int) -> str:
    """Leave out the middle of a long name, whose ends tell it from others."""
    return name if len(name) <= most else f"{name[: most // 2]}…{name[-most // 2 :]}"


def _longest_backticks(source: str) -> int:
    return max((len(run) for run in re.findall("`+", source)), default=0)
