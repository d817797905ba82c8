"""A page as one HTML file: its Markdown and pictures, nothing else to load, and no script.

The Markdown escapes whatever users or ranks wrote. Here HTML is off as well, links lead only to
other files and to web pages, and a policy in the file keeps browsers from running or loading
anything.
"""

import html
import re

from prefect_torch_ddp.tasks.report.markdown import JOINER

MAX_TITLE = 120
_LINK = re.compile(r"https?://|(?!\w+:|//)")
"""A web page, or a place relative to the file."""
_PICTURE = re.compile(r"data:image/svg\+xml;base64,[A-Za-z0-9+/=]+")
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
_STYLE = """
:root { color-scheme: light dark; --text: #1f2328; --page: #fff; --soft: #f2f4f7;
  --line: #d0d7de; --link: #0969da }
@media (prefers-color-scheme: dark) {
  :root { --text: #dfe4ea; --page: #12161c; --soft: #1d232c; --line: #39424e; --link: #6cb0ff }
}
body { margin: 0 auto; padding: 1rem; max-width: 60rem; color: var(--text);
  background: var(--page); font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: break-word }
h1 { font-size: 1.5rem; line-height: 1.25; margin: .5rem 0 }
h2 { font-size: 1.2rem; margin: 2rem 0 .5rem; border-bottom: 1px solid var(--line) }
a { color: var(--link) }
img { max-width: 100%; height: auto; vertical-align: top }
.table { overflow-x: auto }
pre { background: var(--soft); padding: .75rem; border-radius: .4rem; white-space: pre-wrap }
code { font: .875em ui-monospace, monospace; overflow-wrap: anywhere }
table { border-collapse: collapse; width: max-content; font-size: .9rem;
  font-variant-numeric: tabular-nums }
th, td { padding: .25rem .6rem; border-bottom: 1px solid var(--line); vertical-align: top }
td { max-width: 20rem }
th { text-align: left }
@media (max-width: 40rem) { td { max-width: 11rem; overflow-wrap: anywhere } }
@media print { body { max-width: none } }
"""


def _is_allowed(url: str) -> bool:
    return bool(_LINK.match(url) or _PICTURE.fullmatch(url))


def render_document(markdown: str, title: str) -> str:
    """Return a page as a whole HTML file.

    Args:
        markdown: as `render_page` makes it.
        title: of the window; any text.
    """
    # Loaded once, at a run's end.
    from markdown_it import MarkdownIt  # noqa: PLC0415

    parser = MarkdownIt("commonmark", {"html": False}).enable("table")
    # The library's own way to choose what is a link.
    parser.validateLink = _is_allowed  # type: ignore[method-assign]
    tokens = parser.parse(markdown)
    for token in (each for line in tokens for each in line.children or ()):
        if token.type == "image" and not _PICTURE.fullmatch(str(token.attrs["src"])):
            token.type, token.children = "text", None  # its caption is the content
    body = parser.renderer.render(tokens, parser.options, {}).replace(JOINER, "")
    # A table that is wider than a phone is scrolled, the page isn't.
    body = body.replace("<table>", '<div class="table"><table>')
    body = body.replace("</table>", "</table></div>")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<title>{html.escape(title[:MAX_TITLE])}</title>
<style>{_STYLE}</style>
</head>
<body>
{body}</body>
</html>
"""
