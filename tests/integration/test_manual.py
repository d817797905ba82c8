"""The manual's programs run as a reader types them: recipes, tutorial, storage and resume."""

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from ast import literal_eval
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from prefect_torch_ddp import storage_from_uri
from prefect_torch_ddp.records.run_record import list_run_records
from prefect_torch_ddp.storage.directory import DirectoryStorage
from prefect_torch_ddp.storage.protocol import Storage
from tests.integration.test_wheel import run
from tests.support.ports import free_port
from tests.support.storage_conformance import StorageConformance
from tests.support.waiting import HANG_S, wait_until

pytestmark = [pytest.mark.extended, pytest.mark.timeout(900)]

DOCS = Path(__file__).parents[2] / "docs"
BLOCK = re.compile(r"^```(python|bash)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMAND_S = 300


def blocks_of(page: Path) -> list[tuple[str, str]]:
    """Return the language and the text of each block of code."""
    return BLOCK.findall(page.read_text(encoding="utf-8"))


def write_program(text: str, folder: Path) -> str:
    """Write a program to the file that its first line names; return that name."""
    named = re.match(r"# (\w+\.py)\n", text)
    assert named, f"this program has no name: {text[:60]}"
    (folder / named[1]).write_text(text, encoding="utf-8")
    return named[1]


def program_of(recipe: str, folder: Path) -> str:
    """Write a recipe's program, and the file that recipes share; return its name."""
    for _, text in blocks_of(DOCS / "recipes/index.md"):
        write_program(text, folder)
    ((_, text),) = blocks_of(DOCS / f"recipes/{recipe}.md")
    return write_program(text, folder)


def accumulates_exactly(said: str) -> bool:
    """Two ways to cut the batches give one line, which is near 3x + 1."""
    first, second = (json.loads(each) for each in re.findall(r"\[.*?\]", said))
    return first == pytest.approx(second, abs=1e-5) and first == pytest.approx([3, 1], abs=0.2)


def validates_on_each(said: str) -> bool:
    """Each set has an error of its own, small by now."""
    errors = literal_eval(said)
    is_whole = errors.keys() == {"val_old_rmse", "val_new_rmse"}
    return is_whole and len(set(errors.values())) == 2 and max(errors.values()) < 0.3


def has_a_loss_each_epoch(said: str) -> bool:
    """Losses fall over three epochs, which have a score each; none is NaN."""
    losses, scores, first_nan = literal_eval(said).values()
    falls = [*losses] == [*scores] == [1, 2, 3] and losses[3] < losses[1]
    return falls and first_nan == []


def finds_the_best_rate(said: str) -> bool:
    """The largest rate fits best in so few steps, and fits better after more of them."""
    best, error = said.removeprefix("best: ").split(" after 8 epochs: ")
    return literal_eval(best) == {"lr": 0.1, "epochs": 4} and 0.05 < float(error) < 0.15


PROMISES: dict[str, Callable[[str], bool]] = {
    "sweep": finds_the_best_rate,
    "accumulation": accumulates_exactly,
    "early_stopping": lambda said: 3 < int(said.removeprefix("stopped after epoch ")) < 200,
    "best_checkpoint": lambda said: said.endswith(" True") and float(said.split()[0]) > 0.5,
    "validation_sets": validates_on_each,
    "hyperparameters": lambda said: said == "{'step': 160, 'made here': 60, 'lr': 0.01}",
    "fine_tuning": lambda said: said == "True",
    "metrics": has_a_loss_each_epoch,
    "debugging": lambda said: (
        re.fullmatch(r"21 \{'validation_accuracy': 0\.\d+\}", said) is not None
    ),
    "sharded": lambda said: said == "[5, 6]",
}


@pytest.mark.long
@pytest.mark.parametrize("recipe", PROMISES)
@pytest.mark.usefixtures("prefect_api")
def test_a_recipe_does_what_it_says(recipe: str, tmp_path: Path) -> None:
    """The program runs unchanged and prints what the recipe promises."""
    program = program_of(recipe, tmp_path)
    said = run(sys.executable, program, folder=tmp_path, timeout_s=COMMAND_S)
    assert PROMISES[recipe](said), said
    if recipe == "fine_tuning":
        newest, first = list_run_records(DirectoryStorage(tmp_path / "runs"))
        assert (newest.weights_from, first.weights_from) == (first.run_id, None)


def test_each_recipe_is_a_test() -> None:
    """Every recipe has a test and a line in the table of recipes."""
    recipes = {page.stem for page in DOCS.glob("recipes/*.md")} - {"index"}
    assert recipes == PROMISES.keys() | {"storage"}
    table = (DOCS / "recipes/index.md").read_text(encoding="utf-8")
    assert set(re.findall(r"\((\w+)\.md\)", table)) == recipes


class TestTheRecipesStorage(StorageConformance):
    """The storage of the recipe passes what every storage has to."""

    num_examples = 20
    num_races = 2

    @pytest.fixture
    def make_storage(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> Callable[[], Storage]:
        """Install the recipe's module with its entry point, and name storages by URIs."""
        program_of("storage", tmp_path)
        page = (DOCS / "recipes/storage.md").read_text(encoding="utf-8")
        about = tmp_path / "sqlite_storage-1.0.dist-info"
        about.mkdir()
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: sqlite\nVersion: 1.0\n")
        (named,) = re.findall(r'^sqlite = "(.*)"$', page, re.MULTILINE)
        (about / "entry_points.txt").write_text(f"[prefect_torch_ddp.storages]\nsqlite = {named}\n")
        monkeypatch.syspath_prepend(tmp_path)
        numbers = iter(range(1_000_000))
        return lambda: storage_from_uri(f"sqlite://{tmp_path}/{next(numbers)}.db")


@contextmanager
def terminal(command: str, folder: Path, environment: dict[str, str]) -> Iterator[None]:
    """Type a command that stays in the foreground of its terminal, until Ctrl-C."""
    with (folder / "terminal.log").open("ab") as log:
        process = subprocess.Popen(
            ["bash", "-ec", command],
            cwd=folder,
            env=environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            yield
        finally:
            os.killpg(process.pid, signal.SIGINT)
            try:
                process.wait(HANG_S)
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()


def answers(url: str) -> bool:
    """Tell whether a Prefect server answers."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2) as answer:
            return bool(json.load(answer) is True)
    except OSError:
        return False


@pytest.mark.long
def test_the_tutorial_from_a_script_to_a_nightly_run(tmp_path: Path) -> None:
    """Every program and command of the tutorial works, in order."""
    port = str(free_port())
    environment = {
        **os.environ,
        "HOME": str(tmp_path),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PREFECT_HOME": str(tmp_path / "prefect"),
        "PREFECT_SERVER_API_PORT": port,
    }
    said: dict[str, str] = {}
    exports = ""
    with ExitStack() as terminals:
        for language, text in blocks_of(DOCS / "tutorial.md"):
            typed = text.replace("4200", port)
            if language == "python":
                write_program(text, tmp_path)
            elif typed.startswith("# in a "):
                terminals.enter_context(terminal(typed, tmp_path, environment))
                if "server start" in typed:
                    wait_until(lambda: answers(f"http://127.0.0.1:{port}/api"), what="a server")
            else:
                done = subprocess.run(
                    ["bash", "-ec", exports + typed],
                    cwd=tmp_path,
                    env=environment,
                    capture_output=True,
                    text=True,
                    timeout=COMMAND_S,
                    check=False,
                )
                assert done.returncode == 0, typed + done.stdout[-2000:] + done.stderr[-4000:]
                said[typed.strip().splitlines()[-1]] = done.stdout
                exports += "".join(
                    line for line in typed.splitlines(keepends=True) if "export " in line
                )
    trained = ("python script.py", "python two_ranks.py", "python two_ranks.py 200")
    plain, undisturbed, killed = (
        float(accuracy)
        for command in trained
        for accuracy in re.findall(r"accuracy: (\d\.\d+)", said[command])
    )
    assert plain > 0.9
    assert undisturbed == killed > 0.9
    assert "attempt 1" in said["python two_ranks.py"]
    assert "attempt 2" in said["python two_ranks.py 200"]
    assert "{'steps': 16}" in said["python try_it.py"]
    look = said["python look.py"]
    assert re.search(r"train-ddp/points/points +completed", look)
    assert look.count("completed") == 3


WORKLOAD = """
from pathlib import Path

import torch

from prefect_torch_ddp import RankContext, Report


def prepare(ctx: RankContext) -> None:
    torch.save(torch.arange(40.0), ctx.data / "x.pt")


def train(ctx: RankContext) -> None:
    x = torch.load(ctx.data / "x.pt")
    model = ctx.wrap(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    ctx.track(model=model, optimizer=optimizer)
    loader = ctx.loader(torch.utils.data.TensorDataset(x[:, None]), global_batch_size=4)
    for (inputs,) in ctx.steps(loader, epochs=ctx.options.get("epochs", 2)):
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
        if ctx.step == 15 and not Path(FIXED).exists():
            raise ValueError("not fixed yet")
        ctx.checkpoint(force=ctx.step in {13, 14})  # the second waits for the first


def evaluate(ctx: RankContext) -> Report:
    return Report(num_samples=1, metrics={"score": 1.0})
"""


@pytest.mark.long
@pytest.mark.usefixtures("prefect_api", "chain_s3_server")
def test_a_failed_run_continues_as_the_pages_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The blocks of resume.md and storage.md resume a run on S3, and one in a copied folder."""
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    fixed = tmp_path / "fixed"
    module = f"FIXED = {str(fixed)!r}\n{WORKLOAD}"
    (tmp_path / "my_workload.py").write_text(module, encoding="utf-8")

    def type_(text: str) -> str:
        return run("bash", "-ec", text, folder=tmp_path, timeout_s=COMMAND_S)

    def fail(storage: str) -> str:
        once = "-p max_restarts=0 -p retries=0"
        type_(f"! prefect-torch-ddp train my_workload --storage {storage} {once}")
        (record,) = list_run_records(storage_from_uri(storage))
        assert "not fixed yet" in str(record.cause)
        return record.run_id

    monkeypatch.chdir(tmp_path)
    failed = fail("s3://bucket/prefix")
    fixed.touch()
    blocks = blocks_of(DOCS / "resume.md")
    assert [language for language, _ in blocks] == ["bash", "python", "bash"]
    assert blocks[2][1].startswith("dask worker "), "which other tests start"
    type_(blocks[0][1])
    resumed, first = list_run_records(storage_from_uri("s3://bucket/prefix"))
    assert (first.run_id, resumed.state, resumed.num_steps) == (failed, "completed", 20)
    assert type_(f"python {write_program(blocks[1][1], tmp_path)}") == "20 40"

    (text,) = (text for language, text in blocks_of(DOCS / "storage.md") if language == "python")
    exec(compile(text, "docs/storage.md", "exec"), {})
    fixed.unlink()
    (tmp_path / "new/runs").mkdir(parents=True)
    run_id = fail("old")
    fixed.touch()
    (move,) = (text for _, text in blocks_of(DOCS / "storage.md") if "cp -r" in text)
    type_(move.replace("calm-otter-1a2b3c4d5e6f", run_id))
    (moved,) = list_run_records(DirectoryStorage(tmp_path / "new"))
    assert (moved.state, moved.num_steps, moved.run_id != run_id) == ("completed", 20, True)
    assert moved.attempts[0].step is None or moved.attempts[0].step >= 13
