"""The pages of docs/from run as they stand there: programs of others unchanged, and as changed.

Weights are compared with torchrun's by their digest.
"""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import accelerate.test_utils
import numpy as np
import pytest
import torch
from distributed import Client
from PIL import Image

from prefect_torch_ddp import list_runs, read_metrics, run_gang
from prefect_torch_ddp.checkpoint.manifest import list_manifests
from prefect_torch_ddp.storage.directory import DirectoryStorage
from tests.integration.test_manual import COMMAND_S, DOCS, blocks_of, write_program
from tests.integration.test_wheel import run
from tests.support.gangs import own_cluster, said_by_ranks
from tests.support.s3_server import S3Server
from tests.workloads import fsdp2_script
from tests.workloads.trainers import digest_of_state

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("prefect_api"),
]

BEFORE = re.compile(r'^```python title="train.py"\n(.*?)^```$', re.MULTILINE | re.DOTALL)
DIFF = re.compile(r"^```diff\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SITE = Path(accelerate.test_utils.__file__).parent
OF_ACCELERATE = SITE / "scripts" / "test_script.py"
TRAINERS = ("accelerate", "lightning", "transformers")
OTHERS = ("torchrun", "accelerate", "transformers")


def text_of(page: str) -> str:
    """Return a page."""
    return (DOCS / f"from/{page}.md").read_text(encoding="utf-8")


def program_before(page: str, folder: Path) -> Path:
    """Write the program that a page begins with to its file; return that."""
    (code,) = BEFORE.findall(text_of(page))
    program = folder / "train.py"
    program.write_text(code, encoding="utf-8")
    return program


def changed(code: str, diff: str) -> str:
    """Carry out what a page changes in a program."""
    for hunk in re.split(r"^@@\n", diff, flags=re.MULTILINE):
        lines = hunk.splitlines(keepends=True)
        old = "".join(line[1:] or "\n" for line in lines if line[0] != "+")
        new = "".join(line[1:] or "\n" for line in lines if line[0] != "-")
        assert code.count(old) == 1, old
        code = code.replace(old, new)
    return code


ABORTED = "terminate called without an active exception"
"""What a rank of torchrun says that aborts as it ends, seldom, in a thread of torch's."""


def by_torchrun(program: Path, folder: Path) -> str:
    """Run a program under torchrun on two ranks; return the digest of the weights that it saves."""
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    how: Any = {"capture_output": True, "text": True, "timeout": COMMAND_S}
    done = subprocess.run([*command, program, folder], check=False, **how)
    if ABORTED in done.stderr:
        done = subprocess.run([*command, program, folder], check=False, **how)
    assert done.returncode == 0, done.stderr[-4000:]
    return digest_in(folder)


def digest_in(folder: Path) -> str:
    """Return the digest of the weights that a program has left."""
    return digest_of_state(torch.load(folder / "model.pt", weights_only=True))


@pytest.mark.parametrize(
    "page",
    ["lightning", *(pytest.param(each, marks=pytest.mark.more) for each in OTHERS)],
)
def test_a_program_runs_unchanged_and_as_the_page_changes_it(
    page: str, dask_client: Client, tmp_path: Path
) -> None:
    """In a gang it ends with torchrun's bits; with the page's lines too, and the run has its
    steps, metrics and checkpoints."""
    program = program_before(page, tmp_path)
    undisturbed = by_torchrun(program, tmp_path / "torchrun")
    (tmp_path / "gang").mkdir()
    run_gang(dask_client, str(program), [tmp_path / "gang"], world_size=2, process_group="user")
    assert digest_in(tmp_path / "gang") == undisturbed
    for diff in DIFF.findall(text_of(page)):
        program.write_text(changed(program.read_text(encoding="utf-8"), diff), encoding="utf-8")
    ((_, command),) = (block for block in blocks_of(DOCS / f"from/{page}.md") if block[0] == "bash")
    words = command.split()
    assert words[0] == "prefect-torch-ddp"
    run(sys.executable, "-m", "prefect_torch_ddp", *words[1:], folder=tmp_path, timeout_s=COMMAND_S)
    assert digest_in(tmp_path) == undisturbed
    storage = DirectoryStorage(tmp_path / "runs")
    runs = list_runs(storage)
    assert runs["state"].tolist() == ["completed"]
    if page in TRAINERS:
        metrics = read_metrics(storage, runs["run_id"][0])
        assert metrics["step"].max() == 48
        assert metrics["loss"].notna().sum() > 0


@pytest.mark.more
@pytest.mark.parametrize("page", ["torchrun", "ray_train"])
def test_the_task_of_a_page_learns_the_line(page: str, tmp_path: Path) -> None:
    """The program prints the last loss, which is small."""
    ((_, code),) = (block for block in blocks_of(DOCS / f"from/{page}.md") if block[0] == "python")
    said = run(sys.executable, write_program(code, tmp_path), folder=tmp_path, timeout_s=COMMAND_S)
    assert 0 < float(said) < 0.5
    storage = DirectoryStorage(tmp_path / "runs")
    run_id = list_runs(storage)["run_id"][0]
    assert list_manifests(storage, run_id)[-1].step == 48


@pytest.mark.more
def test_transfer_learning_from_a_bucket(chain_s3_server: S3Server, tmp_path: Path) -> None:
    """It writes a checkpoint every 100 steps, and pandas shows its records."""
    source = chain_s3_server.storage("photos")
    generator = np.random.default_rng(0)
    for number in range(32):
        pixels = generator.integers(0, 60, (64, 64, 3)) + np.array([0, 150 * (number % 2), 90])
        file = tmp_path / "one.png"
        Image.fromarray(pixels.astype(np.uint8)).save(file)
        source.write(f"{('cats', 'dogs')[number % 2]}/{number:02}.png", file.read_bytes())
    (_, fit), (_, look) = blocks_of(DOCS / "from/dask_pytorch_ddp.md")
    program = write_program(fit, tmp_path)
    said = run(
        *(sys.executable, program, source.uri, "51"), folder=tmp_path, timeout_s=2 * COMMAND_S
    )
    assert said == "102"
    storage = DirectoryStorage(tmp_path / "runs")
    run_id = list_runs(storage)["run_id"][0]
    assert 100 in [manifest.step for manifest in list_manifests(storage, run_id)]
    command = [sys.executable, write_program(look, tmp_path)]
    how = {"timeout": COMMAND_S, "capture_output": True, "text": True}
    done = subprocess.run(command, cwd=tmp_path, check=True, **how)
    said = done.stdout
    assert re.search(r"^\{1: \d\.\d+, 2: .*51: \d\.\d+\}$", said, re.MULTILINE), said
    assert re.search(r"^[01] +102 ", said, re.MULTILINE), said
    assert re.search(r"best smoothed loss 0\.\d+, at step \d+$", said), said


def test_accelerates_own_launcher_script_passes_in_a_gang(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It checks ranks, loaders, generators and trainings by itself, as under Accelerate's own
    launcher."""
    on_cpus = {"ACCELERATE_USE_CPU": "true"}
    with caplog.at_level("INFO"), own_cluster(2, env=on_cpus) as (_, client):
        run_gang(client, str(OF_ACCELERATE), world_size=2, process_group="user")
    said = "\n".join(said_by_ranks(caplog))
    assert "Distributed environment: DistributedType.MULTI_CPU" in said, said
    assert "Num processes: 2" in said
    assert "**Breakpoint trigger test**" in said, "the last one but one"


def test_an_fsdp2_program_ends_with_torchruns_bits(dask_client: Client, tmp_path: Path) -> None:
    """A model that is sharded over both ranks."""
    program = Path(fsdp2_script.__file__)
    undisturbed = by_torchrun(program, tmp_path / "torchrun")
    (tmp_path / "gang").mkdir()
    run_gang(dask_client, str(program), [tmp_path / "gang"], world_size=2, process_group="user")
    assert digest_in(tmp_path / "gang") == undisturbed
