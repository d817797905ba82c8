"""Reports load little, read git, and show code that runs."""

import subprocess
import sys
from pathlib import Path

from prefect_torch_ddp.tasks.report.page.checkpoints import load_code
from prefect_torch_ddp.tracking.provenance import git_commit

WEIGHTS = "{'weight': torch.ones(1, 2), 'bias': torch.ones(1)}"
SAVE = {
    ".pt": f"torch.save({WEIGHTS}, file)",
    ".safetensors": f"import safetensors.torch; file.write(safetensors.torch.save({WEIGHTS}))",
}
HANG_S = 110


def run(program: str) -> None:
    """Run a program in a fresh interpreter, which must end well."""
    subprocess.run([sys.executable, "-c", program], timeout=HANG_S, check=True)


def test_the_code_that_loads_the_model_runs(tmp_path: Path) -> None:
    """The code loads a model from a file, and by fsspec from elsewhere."""
    program = "import torch, fsspec\n"
    for suffix, save in SAVE.items():
        for uri in (f"{tmp_path}/model{suffix}", f"memory://bucket/model{suffix}"):
            shown = "\n".join(load_code("model", uri).splitlines()[1:-1])
            program += f"""
model = torch.nn.Linear(2, 1)
with fsspec.open({uri!r}, 'wb') as file: {save}
{shown}
assert model(torch.ones(1, 2)).item() == 3.0
"""
    run(program)


def test_versions_are_those_of_what_the_workload_imports_and_torch_is_not_loaded():
    """Versions come from the packages' metadata and the workload's source."""
    run(
        "import sys\nfrom pathlib import Path\n"
        "from prefect_torch_ddp.tracking.provenance import versions_for\n"
        "source = Path('prefect_torch_ddp/examples/digits.py').absolute()\n"
        "found = versions_for(source, 'prefect_torch_ddp.examples.digits')\n"
        "assert {'python', 'prefect-torch-ddp', 'torch', 'torchvision'} <= set(found), found\n"
        "assert {'pillow', 'scikit-learn', 'numpy', 'dask', 'distributed'} <= set(found), found\n"
        "assert found['torch'][0].isdigit() and 'PIL' not in found\n"
        "assert not {'torch', 'prefect', 'dask'} & set(sys.modules)\n"
    )


def test_the_git_commit_is_that_of_the_folder_and_says_when_files_differ(tmp_path: Path):
    """The git commit is that of the folder and says when files differ."""
    assert git_commit(tmp_path) == (None, False)
    assert git_commit(tmp_path / "absent") == (None, False)
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@example.com", "-C", str(tmp_path)]
    (tmp_path / "file").write_text("1")
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "add", "file"], check=True)
    subprocess.run([*git, "commit", "-qm", "one"], check=True)
    commit = subprocess.run(
        [*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True
    ).stdout.strip()
    assert git_commit(tmp_path) == (commit, False)
    (tmp_path / "file").write_text("2")
    assert git_commit(tmp_path) == (commit, True)
