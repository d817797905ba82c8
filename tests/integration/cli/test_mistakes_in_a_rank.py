"""What a newcomer sees of a mistake that only a rank meets: the whole of it, kept as text.

`golden` beside this file has the texts. Mistakes that are refused before a rank starts are in
tests/unit/cli/test_mistakes.py.
"""

import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.integration.cli.test_commands import LIMIT_S, MAX_LINES, ROOT, SCRIPT
from tests.support.newcomer import newcomers_environment
from tests.support.printed import compared

pytestmark = [pytest.mark.extended, pytest.mark.long, pytest.mark.timeout(400)]

GOLDEN = Path(__file__).parent / "golden"
COMMAND = ("-P", "-m", "prefect_torch_ddp", "train", "failing", "--storage", "store")
HEADLINE = "\nprefect-torch-ddp: "
"""Begins the last error that the command prints."""
OF_A_SCRIPT = '\nTraceback (most recent call last):\n  File "{}/script.py"'

IN_TRAIN = "    model = ctx.wrap("
IN_STEP = "        loss.backward()\n"
LOADER = "ctx.loader(dataset(ctx, slice(0, 500)), global_batch_size=32)"
RESULT = 'return {"steps": ctx.step}'
REPORT = "return meter.report()"
OF_EVALUATE = "a dict as a report"
OWN_DATA = """
class Points(torch.utils.data.Dataset):
    def __init__(self, points):
        self.points = points

    def __len__(self):
        return len(self.points)

    def __getitem__(self, number):
        if number == 77:
            raise ValueError("sample 77 is corrupt")
        return self.points[number]


def train("""
ARGUMENTS = """    parser = argparse.ArgumentParser("train.py")
    parser.add_argument("--lr", required=True)
    given = parser.parse_args()
"""


@dataclass(frozen=True)
class Mistake:
    """A change of the README's workload, and what names the mistake in the last error."""

    changes: Sequence[tuple[str, str]]
    code: str
    """The line of code that is shown; or that of the function that is named, if it has ended."""
    last: str = ""
    """The last line of the rank's traceback; empty if none is shown."""
    arguments: Sequence[str] = ()
    """What is typed besides."""
    is_script: bool = False
    """Whether a script calls the flow, and not the command."""


def in_step_20(code: str) -> tuple[str, str]:
    """Return the change that adds code to a step after the backward pass."""
    return IN_STEP, f"{IN_STEP}        if ctx.step == 20:\n            {code}\n"


MISTAKES = {
    "a file that isn't there": Mistake(
        [(IN_TRAIN, f'    words = open("words.txt").read()\n{IN_TRAIN}')],
        'words = open("words.txt").read()',
        "FileNotFoundError: [Errno 2] No such file or directory: 'words.txt'",
    ),
    "a sample in a loader's process": Mistake(
        [
            (LOADER, LOADER.replace("dataset(ctx, slice(0, 500))", "POINTS, num_workers=1")),
            ("POINTS", "Points(dataset(ctx, slice(0, 500)))"),
            ("\ndef train(", OWN_DATA),
        ],
        'raise ValueError("sample 77 is corrupt")',
        "ValueError: sample 77 is corrupt",
    ),
    "arguments of a command": Mistake(
        [("import torch\n", "import argparse\n\nimport torch\n"), (IN_TRAIN, ARGUMENTS + IN_TRAIN)],
        "given = parser.parse_args()",
        "SystemExit: 2",
    ),
    "a function as a result": Mistake([(RESULT, "return lambda: model")], "def train("),
    OF_EVALUATE: Mistake([(REPORT, 'return {"accuracy": 1.0}')], "@torch.no_grad()"),
    "an endless loop": Mistake(
        [
            ("import torch\n", "import time\n\nimport torch\n"),
            in_step_20("while ctx.rank == 1:\n                time.sleep(0.1)"),
        ],
        "time.sleep(0.1)",
        # With the defaults it would be tried nine times, each of which takes the limit.
        arguments=["-p", "progress_timeout_s=6", "-p", "max_restarts=1", "-p", "retries=0"],
    ),
    "a kill": Mistake(
        [
            ("import torch\n", "import os\nimport signal\n\nimport torch\n"),
            in_step_20("os.kill(os.getpid(), signal.SIGKILL)"),
        ],
        "",
    ),
    "a wrong shape in a script": Mistake(
        [in_step_20("labels = labels + torch.zeros(3)")],
        "labels = labels + torch.zeros(3)",
        "RuntimeError: The size of tensor a (16) must match the size of tensor b (3) at "
        "non-singleton dimension 0",
        is_script=True,
    ),
}
MAYBE = (
    "9* INFO    | Flow run 'NAME' - prepare: PROGRESS",
    "9* INFO    | Flow run 'NAME' - train: PROGRESS",
    "9* INFO    | Task run 'train' - [RANKS] checkpoint at step N (N MB, N ms)",
    (
        "1* INFO    | Task run 'train' - [RANKS] a checkpoint is written every N s: it costs N ms, "
        "N % of the time; checkpoint.every_s sets another interval"
    ),
)
"""Lines of a slow machine."""
_MARKS = re.compile(r" +[\^~]+")
"""Below a line of code: each version of Python sets them in its own way."""
# Ranks that fail at the same time are told as one, or one of them and maybe the other after it.
_CONSEQUENCES = re.compile(r"\n\nas a consequence:(\n  .*)+")
_OF_RANKS = "[RANKS] "
_ANY_RANK = (
    (r"\branks? \d(, \d)* on (\S+) failed in", r"RANKS on \2 failed in"),
    (r"/rank-\d+/", "/rank-N/"),
    (r"on stderr of rank \d", "on stderr of rank N"),
    (r"\[ranks? \d(, \d)*\] (?!is at)", _OF_RANKS),
    # Of torch, which differ between versions.
    (r'"[^"]*/site-packages/([^"]+)", line \d+', r'"SITE/\1", line N'),
    (r"at step \d+ \(", "at step N ("),
)
SHOWN_BY_STACKS = {"an endless loop"}
"""Stacks of all ranks go to the log. Those of torch stay, which say which call waits."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.more if name == OF_EVALUATE else ())
        for name in MISTAKES
    ],
)
def test_a_mistake_in_a_rank_is_shown_once_and_in_few_lines(
    tmp_path: Path, prefect_api: str, name: str
) -> None:
    """All lines are as the golden text has them: the user's line, what is wrong, what to do."""
    mistake = MISTAKES[name]
    source = write(tmp_path, mistake.changes)
    said = seen(tmp_path, prefect_api, mistake)
    differs = compared(golden(name), alike(said), tmp_path, MAYBE)
    if differs:  # a loaded machine may add a line, or another library's; not twice
        said = seen(tmp_path, prefect_api, mistake)
        differs = compared(golden(name), alike(said), tmp_path, MAYBE)
    assert not differs, differs

    begin = OF_A_SCRIPT.format(tmp_path) if mistake.is_script else HEADLINE
    log, _, error = said.partition(begin)
    assert_is_brief(log, error)
    assert_has_no_frames_of_others(log if name not in SHOWN_BY_STACKS else "", error)
    shown = error.splitlines()
    if mistake.code:
        numbers = [at for at, line in enumerate(source, 1) if mistake.code in line]
        assert len(numbers) == 1
        assert re.search(rf"{re.escape(str(tmp_path))}/failing.py\W+(line )?{numbers[0]}\b", error)
    if mistake.last:
        assert [line.strip() for line in shown].count(mistake.code) == 1
        assert sum(line.endswith(mistake.last) for line in shown) <= 2, "the headline, traceback"
        assert shown.count(mistake.last) == 1
        assert mistake.last not in log.splitlines(), "the whole traceback is at the end only"
    assert "Traceback (most recent" not in log


def test_each_golden_text_is_of_a_mistake() -> None:
    """One that is left over would look as if it were checked."""
    assert sorted(GOLDEN.iterdir()) == sorted(map(golden, MISTAKES))


def alike(text: str) -> str:
    """Return a text that is the same whichever rank comes first, and with any version of Python."""
    lines: list[str] = []
    for line in _CONSEQUENCES.sub("", text).splitlines():
        for pattern, name in _ANY_RANK:
            line = re.sub(pattern, name, line)  # noqa: PLW2901 - one after the other
        of_ranks = [at for at, each in enumerate(lines, 1) if _OF_RANKS not in each]
        # One of ranks, of which an equal one of another rank may follow.
        is_said = line.partition(_OF_RANKS)[2] in [
            each.partition(_OF_RANKS)[2] for each in lines[max(of_ranks, default=0) :]
        ]
        if not (_MARKS.fullmatch(line) or (_OF_RANKS in line and is_said)):
            lines.append(line)
    return "\n".join(lines)


def golden(name: str) -> Path:
    """Return the file with what is printed of a mistake."""
    return GOLDEN / (re.sub(r"\W", "_", name) + ".txt")


def write(folder: Path, changes: Sequence[tuple[str, str]]) -> list[str]:
    """Write the README's workload with changes, and a script that trains it; return its lines."""
    _, rest = (ROOT / "README.md").read_text(encoding="utf-8").split("# my_workload.py\n")
    source = rest.partition("\n```")[0]
    for before, after in changes:
        assert source.count(before) == 1
        source = source.replace(before, after)
    (folder / "failing.py").write_text(source, encoding="utf-8")
    (folder / "script.py").write_text(SCRIPT, encoding="utf-8")
    return source.splitlines()


def seen(folder: Path, api_url: str, mistake: Mistake) -> str:
    """Run the command, or the script, as a newcomer does; return what both streams show."""
    bin_folder = Path(sys.executable).parent
    done = subprocess.run(
        [sys.executable, *(("script.py",) if mistake.is_script else COMMAND), *mistake.arguments],
        cwd=folder,
        env=newcomers_environment(folder, bin_folder, PREFECT_API_URL=api_url),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == (1 if mistake.is_script else 2), done.stdout
    return done.stdout


def assert_is_brief(log: str, error: str) -> None:
    """Fail if the log, without what only informs, or the last error is longer than a screen."""
    told = [line for line in log.splitlines() if " | INFO " not in line]
    assert len(told) <= MAX_LINES, log
    assert 0 < error.count("\n") <= MAX_LINES, error
    assert "\\n" not in log, "no escaped ends of lines"


def assert_has_no_frames_of_others(*texts: str) -> None:
    """Fail if a frame of an installed package, of Python or of this package is shown."""
    for text in texts:
        assert "site-packages" not in text, text
        assert str(ROOT / "prefect_torch_ddp") not in text, text
        assert "The above exception" not in text, text
