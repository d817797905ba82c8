"""Names that metrics can't have, since a line of a table or a log would break."""

import unicodedata

from prefect_torch_ddp.errors import InvalidParamsError

BREAKING = frozenset(["Cc", "Cs", "Zl", "Zp"])
"""Unicode's categories of control characters, lone surrogates, line and paragraph separators."""


def refuse_control(metric: str) -> None:
    """Refuse a metric's name that has control characters or line breaks.

    Raises:
        InvalidParamsError: it has some.
    """
    if metric.isprintable():
        return
    found = [each for each in metric if unicodedata.category(each) in BREAKING]
    if found:
        which = ", ".join(repr(each) for each in dict.fromkeys(found))
        msg = f"the metric's name {metric!r} has control characters: {which}; leave them out"
        raise InvalidParamsError(msg)
