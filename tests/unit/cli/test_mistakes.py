"""The mistakes of a first hour: what the command prints for each, kept as a text."""

import os
import pwd
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from prefect_torch_ddp import DirectoryStorage, StorageError, TrainParams
from prefect_torch_ddp.cli.app import main

README = (Path(__file__).parents[3] / "README.md").read_text(encoding="utf-8")
MAX_LINES = 25
USAGE = """\
Usage: prefect-torch-ddp train [OPTIONS] [WORKLOAD]
Try 'prefect-torch-ddp train -h' for help.

"""
MISTAKES = {
    "an option of the workload, misspelt": (
        "train my_workload -o epoch=3",
        (
            "prefect-torch-ddp: workload 'my_workload' can't take the options: there is no option "
            "epoch; did you mean epochs?; there are epochs, lr\n"
        ),
    ),
    "a parameter, misspelt": (
        "train my_workload -p sed=3",
        "prefect-torch-ddp: there is no option sed; did you mean seed?\n",
    ),
    "a parameter of a group, misspelt": (
        "train my_workload -p checkpoint.every_epoch=1",
        (
            "prefect-torch-ddp: there is no option checkpoint.every_epoch; "
            "did you mean checkpoint.every_epochs?\n"
        ),
    ),
    "an option of the command, misspelt": (
        "train my_workload --worldsize 2",
        "prefect-torch-ddp: there is no option --worldsize; did you mean --world-size?\n",
    ),
    "an option of the workload, as one of the command": (
        "train my_workload --epochs=3",
        (
            "prefect-torch-ddp: there is no option --epochs of the command: write -o epochs=3 for "
            "an option of the workload\n"
        ),
    ),
    "an option of a resumed run, as one of the command": (
        "resume --epochs 3 latest",
        (
            "prefect-torch-ddp: there is no option --epochs of the command: write -o epochs=3 for "
            "an option of the workload\n"
        ),
    ),
    "an option of the workload, without a sign": (
        "train my_workload -o epochs 3",
        (
            "prefect-torch-ddp: 3 is one argument too many; write an option of the workload as -o "
            "name=value; `prefect-torch-ddp train -h` shows what else can be given\n"
        ),
    ),
    "an option of the workload, without -o": (
        "train my_workload epochs=3 lr=0.1",
        (
            "prefect-torch-ddp: epochs=3 has no option of the command before it: write -o epochs=3 "
            "for an option of the workload, -d for one of prepare, -p for a field of TrainParams\n"
        ),
    ),
    "an option of the workload, without -o and workload": (
        "train epochs=3",
        (
            "prefect-torch-ddp: epochs=3 has no option of the command before it: write -o epochs=3 "
            "for an option of the workload, -d for one of prepare, -p for a field of TrainParams\n"
        ),
    ),
    "an option of a resumed run, without -o": (
        "resume latest epochs=3",
        (
            "prefect-torch-ddp: epochs=3 has no option of the command before it: write -o epochs=3 "
            "for an option of the workload, -p for a field of TrainParams\n"
        ),
    ),
    "two workloads": (
        "train my_workload jobs.nested_workload",
        (
            "prefect-torch-ddp: jobs.nested_workload is one argument too many; write an option of "
            "the workload as -o name=value; `prefect-torch-ddp train -h` shows what else can be "
            "given\n"
        ),
    ),
    "a number of ranks that can't be": (
        "train my_workload -n 0",
        "prefect-torch-ddp: world_size is 0; it should be greater than or equal to 1\n",
    ),
    "a number of ranks that is none": (
        "train my_workload -n two",
        (
            f"{USAGE}Error: Invalid value for '-n' / '--world-size': Input should be a valid "
            "integer, unable to parse string as an integer\n"
        ),
    ),
    "a file's name": (
        "train my_workload.py",
        (
            "prefect-torch-ddp: workload 'my_workload.py' is a file's name; give its module's: "
            "my_workload\n"
        ),
    ),
    "a path": (
        "train jobs/nested_workload.py",
        (
            "prefect-torch-ddp: workload is 'jobs/nested_workload.py'; give its module's name: "
            "jobs.nested_workload\n"
        ),
    ),
    "a path out of the folder": (
        "train ../elsewhere/my_workload.py",
        (
            "prefect-torch-ddp: workload is '../elsewhere/my_workload.py'; change to its folder, "
            "../elsewhere, and give its module's name, my_workload\n"
        ),
    ),
    "a file in another folder": (
        "train nested_workload",
        (
            "prefect-torch-ddp: workload 'nested_workload' can't be found: no module "
            "nested_workload; did you mean jobs.nested_workload?\n"
        ),
    ),
    "a file in the folder above": (
        "train above_workload",
        (
            "prefect-torch-ddp: workload 'above_workload' can't be found: no module "
            "above_workload; it is in ABOVE: change to that folder\n"
        ),
    ),
    "a file that isn't there": (
        "train nowhere",
        (
            "prefect-torch-ddp: workload 'nowhere' can't be found: no module nowhere; looked "
            "for in HERE and among what is installed; write it as package.module\n"
        ),
    ),
    "the included example, by its short name": (
        "train digits",
        (
            "prefect-torch-ddp: workload 'digits' can't be found: no module digits; did you mean "
            "prefect_torch_ddp.examples.digits?\n"
        ),
    ),
    "a file, misspelt": (
        "train my_worklod",
        (
            "prefect-torch-ddp: workload 'my_worklod' can't be found: no module my_worklod; did "
            "you mean my_workload?\n"
        ),
    ),
    "a function without ctx": (
        "train without_ctx",
        (
            "prefect-torch-ddp: train of workload 'without_ctx' takes no argument, and is given a "
            "RankContext: write `def train(ctx):`\n"
        ),
    ),
    "a function without ctx under a decorator of torch": (
        "train under_no_grad",
        (
            "prefect-torch-ddp: evaluate of workload 'under_no_grad' takes no argument, and is "
            "given a RankContext: write `def evaluate(ctx):`\n"
        ),
    ),
    "a function with arguments of its own": (
        "train with_more",
        (
            "prefect-torch-ddp: train of workload 'with_more' takes lr, size too; options are in "
            "ctx.options: write `def train(ctx):`\n"
        ),
    ),
    "a function that isn't there": (
        "train lacking",
        (
            "prefect-torch-ddp: workload 'lacking' has no function 'evaluate': a workload defines "
            "prepare(ctx), train(ctx) and evaluate(ctx); lacking.py defines prepare, train\n"
        ),
    ),
    "a module with an error of syntax": (
        "train broken",
        (
            "prefect-torch-ddp: workload 'broken' can't be parsed: '(' was never closed "
            "(broken.py, line 1)\n"
        ),
    ),
    "an option of a script, without --": (
        "run-script train.py --lr 0.1",
        (
            "prefect-torch-ddp: there is no option --lr of run-script; write the script's own "
            "after --, as in: train.py -- --lr 0.1 --storage store\n"
        ),
    ),
    "a number of ranks for a script, misspelt": (
        "run-script train.py --nproc_per_nod 2",
        (
            "prefect-torch-ddp: there is no option --nproc_per_nod of run-script; did you mean "
            "--nproc_per_node?\n"
        ),
    ),
    "a script's module that isn't there": (
        "run-script -m my_worklod.train",
        (
            "prefect-torch-ddp: there is no module my_worklod that can be imported here; did you "
            "mean my_workload?\n"
        ),
    ),
    "a script that isn't there": (
        "run-script nowhere.py",
        "prefect-torch-ddp: there is no script nowhere.py in HERE; add -m to run a module\n",
    ),
    "a storage of a scheme that there is not": (
        "train my_workload --storage ftp://x",
        (
            "prefect-torch-ddp: ftp: names no known storage; write a directory (/data/runs, "
            "~/runs), s3://bucket/prefix, or a Prefect block such as s3-bucket/name; a path that "
            "begins like that is written ./ftp:...\n"
        ),
    ),
    "a storage without its colon": (
        "train my_workload --storage s3//x",
        (
            "prefect-torch-ddp: s3// lacks its colon: write s3://; a folder of that name is "
            "written ./s3//...\n"
        ),
    ),
    "a storage without a slash": (
        "train my_workload --storage s3:/x",
        (
            "prefect-torch-ddp: s3: names no known storage; write s3:// at its beginning, with two "
            "slashes; a path that begins like that is written ./s3:...\n"
        ),
    ),
    "a storage below a file": (
        "train my_workload --storage broken.py/runs",
        (
            "prefect-torch-ddp: can't write HERE/broken.py/runs/: Not a directory; a file stands "
            "where a folder is needed: rename it, or choose another storage\n"
        ),
    ),
    "a source that isn't there": (
        "train my_workload --source nowhere/raw",
        (
            "prefect-torch-ddp: source is nowhere/raw, and there is no folder HERE/nowhere/raw "
            "here; the flow and the ranks have to see the same one\n"
        ),
    ),
    "a source that is nearly a block": (
        "train my_workload --source S3-bucket/raw",
        (
            "prefect-torch-ddp: S3-bucket/raw names no block that can be a storage: write one as "
            "<kind>/<name> with the kind s3-bucket, remote-file-system, local-file-system, and "
            "nothing after its name (a folder in the bucket is a setting of the block); a folder "
            "here as ./S3-bucket/raw\n"
        ),
    ),
    "a way to show metrics that there is not": (
        "metrics latest --by rank",
        (
            "Usage: prefect-torch-ddp metrics [OPTIONS] {RUN}\n"
            "Try 'prefect-torch-ddp metrics -h' for help.\n\n"
            "Error: Invalid value for '--by': rank is neither step nor record\n"
        ),
    ),
    "a run that isn't there": (
        "show calm-otter",
        "prefect-torch-ddp: there is no run in HERE/store; choose another storage with --storage\n",
    ),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a folder with workloads, right ones and wrong ones, and stand there."""
    _, rest = README.split("# my_workload.py\n")
    right = rest.partition("\n```")[0]
    files = {
        "my_workload.py": right,
        "jobs/nested_workload.py": right,
        "../above_workload.py": right,
        "under_no_grad.py": right.replace("def evaluate(ctx: RankContext)", "def evaluate()"),
        "without_ctx.py": right.replace("def train(ctx: RankContext)", "def train()"),
        "with_more.py": right.replace("def train(ctx: RankContext)", "def train(ctx, lr, *, size)"),
        "lacking.py": "def prepare(ctx): ...\ndef train(ctx): ...\n",
        "broken.py": "def prepare(ctx: ...\n",
    }
    here = tmp_path / "here"
    for name, source in files.items():
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).write_text(source, encoding="utf-8")
    monkeypatch.chdir(here)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")  # nobody asks it
    monkeypatch.setattr("prefect_torch_ddp.server.use_server", _fail_to_serve)
    return here


def _fail_to_serve() -> None:
    pytest.fail("a mistake needs no server to be refused")


@pytest.mark.parametrize(("typed", "expected"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_refused_with_the_way_out(
    folder: Path, capfd: pytest.CaptureFixture[str], typed: str, expected: str
) -> None:
    """In a few lines on stderr, with status 2, before a server, a cluster or a rank starts."""
    storage = [] if "--storage" in typed else ["--storage", "store"]
    with pytest.raises(SystemExit) as left:
        main([*typed.split(), *storage])
    printed = capfd.readouterr()
    said = printed.err.replace(str(folder), "HERE").replace(str(folder.parent), "ABOVE")
    assert (said, printed.out) == (expected, "")
    assert left.value.code == 2
    assert said.count("\n") <= MAX_LINES
    assert not (folder / "store").exists()


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"sed": 1}, "sed\n  there is no option sed; did you mean seed?"),
        ({"checkpoint": {"keep": 1}}, "checkpoint.keep\n  there is no option keep; did you mean"),
        ({"cluster": {"adress": "x"}}, "there is no option adress; did you mean address?"),
        ({"qwertz": 1}, "there is no option qwertz "),
    ],
)
def test_in_python_a_misspelt_parameter_names_the_near_one(
    given: dict[str, Any], says: str
) -> None:
    """In a group of parameters too, together with what else is wrong."""
    with pytest.raises(ValidationError) as error:
        TrainParams(**{"world_size": 0, "resources": {"GPU": 0}, **given})
    text = str(error.value)
    assert says in text
    assert "greater than or equal to 1" in text
    assert "give positive amounts by name" in text
    assert text.count("\n") < MAX_LINES


def test_a_folder_without_rights_names_its_owner_and_the_user(tmp_path: Path) -> None:
    """So that one knows whom to ask, and which of both is wrong."""
    is_root = os.geteuid() == 0
    tmp_path.chmod(0o555)
    try:
        if is_root:
            os.seteuid(65534)
        with pytest.raises(StorageError) as error:
            DirectoryStorage(tmp_path / "mine").check_writable()
    finally:
        if is_root:
            os.seteuid(0)
        tmp_path.chmod(0o755)
    says = str(error.value)
    assert "Permission denied; give this user the right to do so, or choose another storage" in says
    named = re.search(r"; (/\S+) has d[rwx-]{9}, user \w+, and this process is user (\w+)$", says)
    assert named is not None, says
    # Pytest's own folders may be shut for others, which is then the one to open.
    assert tmp_path.is_relative_to(named[1])
    assert named[2] == pwd.getpwuid(65534 if is_root else os.geteuid()).pw_name
