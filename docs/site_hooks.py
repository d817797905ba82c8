"""What the site has besides docs/: pages that lie elsewhere, the options, a mended search.

MkDocs calls the functions named `on_...`; mkdocs.yml names this file.
"""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from prefect_torch_ddp import CheckpointParams, ClusterParams, Params, TrainParams
from prefect_torch_ddp.gang.caller.plan import CallParams
from prefect_torch_ddp.option_lines import OptionLine, option_lines
from prefect_torch_ddp.run_form import summary_of
from prefect_torch_ddp.tasks.gangs.task_training import TaskParams

ROOT = Path(__file__).parents[1]
ELSEWHERE = {
    "README.md": "index.md",
    "CHANGELOG.md": "changes.md",
    "CONTRIBUTING.md": "contributing.md",
    "deployments/README.md": "deployments.md",
    "tests/README.md": "tests.md",
    "tests/faults.md": "faults.md",
}
"""Pages that are read in the repository too, under their names in the site."""
LEVELS: Mapping[str, type[Params]] = {
    "run_gang": CallParams,
    "ddp_task": TaskParams,
    "TrainParams": TrainParams,
}
PARTS: Mapping[str, type[Params]] = {"checkpoint": CheckpointParams, "cluster": ClusterParams}
"""Options that are parameters themselves."""
ANSWERS = ("faq.md", "resume.md", "storage.md")
INTERNALS = (
    *("architecture.md", "gang.md", "watches.md", "checkpoints.md", "order.md", "prefect.md"),
    *("measurements.md", "formats.md", "networks.md", "contributing.md", "api.md"),
)
LISTS = ("faults.md", "tests.md", "changes.md")
SEARCHED = {
    **dict.fromkeys(ANSWERS, 2.0),
    "failures.md": 1.6,  # of which half are error messages
    **dict.fromkeys(INTERNALS, 0.5),
    **dict.fromkeys(LISTS, 0.2),
}
"""How much a page counts in the site's search, if not 1: answers before how it is made."""
LINK = re.compile(r"\[(?P<text>[^][]*)\]\((?![a-z]+:|#|/)(?P<path>[^)\s#]+)(?P<anchor>#[\w-]+)?\)")

OPTIONS = """---
hide: [toc]
---

# Options

Every option of the three levels, with its default at each; a level without a default doesn't have
the option. `run_gang` and `ddp_task` take them by keyword, `train_flow` as `TrainParams(...)`.
`ddp_task` also takes those of Prefect's tasks, such as `retries`, `tags` and `timeout_seconds`.
*Empty* means None, as in the run form. This page is made of their declarations; `help(run_gang)`
and `help(ddp_task)` show the same lines.
"""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that lie elsewhere, and the one that is made here."""
    for path, name in ELSEWHERE.items():
        files.append(File.generated(config, name, abs_src_path=str(ROOT / path)))
    files.append(File.generated(config, "options.md", content=options_page()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Have links lead to the pages as the site names them; those to code become plain text."""
    del config, files
    names = {name: path for path, name in ELSEWHERE.items()}
    here = page.file.src_uri
    if here in SEARCHED:
        page.meta["search"] = {"boost": SEARCHED[here]}
    written = Path(names.get(here, f"docs/{here}"))

    def moved(found: re.Match[str]) -> str:
        target = Path(os.path.normpath(written.parent / found["path"]))
        if not (ROOT / target).exists():
            return found[0]  # MkDocs reports it
        if str(target) in ELSEWHERE:
            there = ELSEWHERE[str(target)]
        elif target.parts[0] == "docs":
            there = str(target.relative_to("docs"))
        else:
            return found["text"]  # code is no part of the site
        path = os.path.relpath(there, Path(here).parent)
        return f"[{found['text']}]({path}{found['anchor'] or ''})"

    return LINK.sub(moved, markdown)


def on_post_build(config: MkDocsConfig) -> None:
    """Mend the theme's search."""
    [worker] = Path(config.site_dir).glob("assets/javascripts/workers/search.*.js")
    mend = (ROOT / "docs/search_worker.js").read_text()
    worker.write_text(f"{worker.read_text()}\n{mend}")


def options_page() -> str:
    """Return docs/options.md."""
    by_level = {level: option_lines(model) for level, model in LEVELS.items()}
    names = dict.fromkeys(line.name for lines in by_level.values() for line in lines)
    rows = [
        _row(
            {
                level: line
                for level, lines in by_level.items()
                for line in lines
                if line.name == name
            }
        )
        for name in names
    ]
    columns = ("option", "value", *(f"`{level}`" for level in LEVELS), "meaning")
    parts = [OPTIONS, _table(columns, rows)]
    for option, model in PARTS.items():
        about = (
            f"\n## {model.__name__}\n\nThe value of `{option}`. {summary_of(model.__doc__ or '')}\n"
        )
        lines = [
            (f"`{line.name}`", line.values, f"`{line.default}`", line.meaning)
            for line in option_lines(model)
        ]
        parts += [about, _table(("option", "value", "default", "meaning"), lines)]
    return "\n".join(parts)


def _row(lines: Mapping[str, OptionLine]) -> tuple[str, ...]:
    """Return the row of an option, of its lines at those levels that have it."""
    name = next(iter(lines.values())).name
    defaults = [f"`{lines[level].default}`" if level in lines else "" for level in LEVELS]
    values = _by_level({level: line.values for level, line in lines.items()})
    meaning = _by_level({level: line.meaning for level, line in lines.items()})
    return (f"`{name}`", values, *defaults, meaning)


def _by_level(texts: Mapping[str, str]) -> str:
    """Return what is said of an option, once if all levels say the same."""
    said: dict[str, list[str]] = {}
    for level, text in texts.items():
        said.setdefault(text, []).append(f"`{level}`")
    if len(said) == 1:
        return next(iter(said))
    return "<br>".join(f"{', '.join(levels)}: {text}" for text, levels in said.items())


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    escaped = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    lines = [columns, ["---"] * len(columns), *escaped]
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    return f'<div class="options" markdown="1">\n\n{table}\n\n</div>\n'
