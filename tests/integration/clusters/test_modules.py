"""Jobs whose Python and packages come from environment modules, and tcsh as the login shell."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import prefect_torch_ddp
from prefect_torch_ddp.records.run_record import list_run_records
from prefect_torch_ddp.storage.directory import DirectoryStorage
from tests.integration.clusters.sites import Site
from tests.support.waiting import HANG_S, wait_until

INIT = Path("/usr/share/modules/init")
COMMAND_S = 240
MODULE = """#%Module
prepend-path PATH {bin}
prepend-path PYTHONPATH {packages}
"""
# -f: without the startup files of whoever runs this.
LOGIN = """
source {init}/tcsh
module use {modules}
module load training
python -m prefect_torch_ddp train prefect_torch_ddp.examples.digits --world-size 1 \
  --cluster-file slurm.yaml --storage {folder}/runs -p workers_timeout_s=120
"""


def skip_without_modules() -> None:
    """Skip the test, with what to install, on a machine without modules or tcsh."""
    if not (INIT / "bash").exists() or not shutil.which("tcsh"):
        pytest.skip("apt-get install environment-modules tcsh, or make system-packages")


def write_module(folder: Path) -> None:
    """Make a module of this Python without its environment, and of the packages here."""
    packages = [path for path in sys.path if "site-packages" in path]
    packages.append(str(Path(prefect_torch_ddp.__file__).parents[1]))
    folder.mkdir()
    bare = Path(sys.base_prefix) / "bin"
    (folder / "training").write_text(MODULE.format(bin=bare, packages=":".join(packages)))


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("batch_system", ["slurm"], indirect=True)
def test_packages_come_from_modules_and_the_login_shell_is_tcsh(
    site: Site, tmp_path: Path, prefect_api: str
) -> None:
    """A run's job finds Python and all packages by PATH and PYTHONPATH, which only modules set."""
    skip_without_modules()
    write_module(tmp_path / "modules")
    described = {
        "cluster_class": "dask_jobqueue.SLURMCluster",
        "cluster_kwargs": {
            "n_workers": 1,
            "processes": 1,
            "cores": 2,
            "memory": "4GB",
            "walltime": "00:10:00",
            "interface": "lo",
            "local_directory": str(tmp_path),
            "log_directory": str(tmp_path / "logs"),
            # A job starts without the variables of the shell that submitted it; SLURM_CONF is
            # how tests know a job's processes.
            "job_extra_directives": ["--export=SLURM_CONF"],
            "job_script_prologue": [
                f"source {INIT}/bash",
                f"module use {tmp_path}/modules",
                "module load training",
            ],
            "python": "exec python",
            "worker_extra_args": ["--preload-nanny", "prefect_torch_ddp.gang.worker.leave"],
            "scheduler_options": {
                "interface": "lo",
                "dashboard_address": "127.0.0.1:0",
                "allowed_failures": 0,
            },
        },
        "adapt_kwargs": {"minimum": 1, "maximum": 1},
    }
    (tmp_path / "slurm.yaml").write_text(yaml.safe_dump(described))
    typed = LOGIN.format(init=INIT, modules=tmp_path / "modules", folder=tmp_path)
    done = subprocess.run(
        ["tcsh", "-fc", typed],
        cwd=tmp_path,
        check=False,
        capture_output=True,
        text=True,
        timeout=COMMAND_S,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    (run,) = list_run_records(DirectoryStorage(tmp_path / "runs"))
    assert run.state == "completed"
    wait_until(lambda: not site.job_ids() and not site.processes(), 2 * HANG_S, "the jobs' end")
