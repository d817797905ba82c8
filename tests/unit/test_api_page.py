"""docs/api.md is written from the public names: it is current, and a page."""

from tests.api_page import PAGE, page


def test_the_page_is_what_the_docstrings_say() -> None:
    """After a change of a public name, signature or docstring: `python -m tests.api_page`."""
    shown = PAGE.read_text(encoding="utf-8")
    assert shown == page(), "run `python -m tests.api_page`"
    assert shown.count("\n") < 200
