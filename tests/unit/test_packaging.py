"""What is installed and deployed: pinned versions, the caps that keep a server working, and the
deployment's description."""

import ast
import re
import sys
import tomllib
from importlib import import_module
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version
from prefect import Flow

from prefect_torch_ddp import ClusterParams, InvalidParamsError, TrainParams
from prefect_torch_ddp.blocks import resolve_storage

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
REQUIREMENTS = {found.name: found for found in map(Requirement, PROJECT["dependencies"])}
OPTIONAL = {"pandas", "pyarrow", "IPython", "mlflow", "tensorboard", "transformers"}
OPTIONAL |= {"accelerate", "pytorch_lightning", "lightning_fabric", "xarray", "zarr", "wandb"}
"""What an extra or a notebook brings."""
COMES_WITH = {"pydantic-core": "pydantic", "botocore": "boto3", "urllib3": "boto3"}
"""What is always there with a requirement, in the version that it wants."""
PINS = [
    line
    for line in (ROOT / "constraints.txt").read_text().splitlines()
    if line and not line.startswith("#")
]
DEPLOYMENTS = yaml.safe_load((ROOT / "deployments" / "prefect.yaml").read_text())["deployments"]


def test_ci_and_commits_are_checked_by_what_the_makefile_calls() -> None:
    """CI runs `.ci/run` and `make docs`; each command of a commit's hook is in `make lint`."""
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]
    commands = [step.get("run", "") for job in jobs.values() for step in job["steps"]]
    assert any(command.endswith(" .ci/run") for command in commands)
    assert "make docs" in commands
    (repo,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    lint = (ROOT / "Makefile").read_text().replace("$(BIN)", ".venv/bin")
    entries = [hook["entry"].replace(" --force-exclude", "") for hook in repo["hooks"]]
    assert len(entries) == 3
    assert all(f"\t{entry}" in lint for entry in entries), entries


def test_constraints_are_names_and_versions_alone() -> None:
    """No address, no path, no editable project: the file works on any machine."""
    odd = [pin for pin in PINS if not re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+", pin)]
    assert not odd
    assert "prefect-torch-ddp" not in {pin.partition("==")[0] for pin in PINS}


def test_what_the_package_imports_is_required() -> None:
    """Nothing is there only since something else, or the dev extra, brings it."""
    homes = packages_distributions()
    required = {name.lower() for name in REQUIREMENTS}
    for path in (ROOT / "prefect_torch_ddp").rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        tops = imported_tops(tree) - sys.stdlib_module_names - {"prefect_torch_ddp", *OPTIONAL}
        for top in tops:
            names = {name.lower().replace("_", "-") for name in homes[top]}
            names |= {COMES_WITH[name] for name in names & COMES_WITH.keys()}
            assert names & required, f"{path.name} imports {top} of {names}"


def imported_tops(tree: ast.AST) -> set[str]:
    """Return the top-level packages that a module imports anywhere."""
    nodes = list(ast.walk(tree))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    return {name.partition(".")[0] for name in names} - {""}


def test_constraints_satisfy_the_project() -> None:
    """Every dependency, of the extras dev and docs too, is pinned within the range that pyproject
    promises."""
    pins = {
        name.lower().replace("_", "-"): Version(version)
        for name, _, version in (pin.partition("==") for pin in PINS)
    }
    extras = EXTRAS
    assert "prefect-torch-ddp[docs]" in extras["dev"]
    for text in {*PROJECT["dependencies"], *extras["dev"], *extras["docs"]}:
        wanted = Requirement(text)
        if wanted.name == PROJECT["name"]:
            continue  # what another extra has
        assert pins[wanted.name.lower()] in wanted.specifier, wanted.name


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        pytest.param("prefect", "3.8.8", id="forked children end with an error"),
        pytest.param("prefect", "3.10.0", id="not tried yet"),
        pytest.param("torch", "2.13.0", id="a CPU build that no torchvision matches"),
        pytest.param("s3fs", "0.4.2", id="what the resolver takes without a floor"),
        pytest.param("prefect-aws", "0.5.13", id="what the resolver takes without a floor"),
    ],
)
def test_versions_that_break_are_shut_out(name: str, broken: str) -> None:
    """A cap or floor that is dropped by accident fails here."""
    (aws,) = map(Requirement, EXTRAS["aws"])
    assert Version(broken) not in {**REQUIREMENTS, aws.name: aws}[name].specifier


def test_all_has_every_extra_that_runs() -> None:
    """But `cuda`, which pins Dask, and those for whoever works on the package itself."""
    (everything,) = map(Requirement, EXTRAS["all"])
    assert everything.name == PROJECT["name"]
    assert everything.extras == EXTRAS.keys() - {"all", "cuda", "dev", "docs"}


def test_a_block_whose_extra_is_missing_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The storage is refused before anything starts, with what to install."""
    monkeypatch.setitem(sys.modules, "prefect_aws", None)
    says = r"s3-bucket/nightly needs prefect-aws.*pip install 'prefect-torch-ddp\[aws\]'"
    with pytest.raises(InvalidParamsError, match=says):
        resolve_storage("s3-bucket/nightly")


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=lambda deployment: deployment["name"])
def test_a_deployment_names_an_entrypoint_that_exists(deployment: dict[str, Any]) -> None:
    """A flow, in a file or a module."""
    place, _, name = deployment["entrypoint"].partition(":")
    module = import_module(place.removesuffix(".py").replace("/", "."))
    assert isinstance(getattr(module, name), Flow)


def test_nightly_runs_at_a_stated_hour_and_never_overlaps() -> None:
    """Cron, time zone, one run at a time, in the pool that the README creates; its parameters
    are accepted."""
    (nightly,) = [deployment for deployment in DEPLOYMENTS if deployment["name"] == "nightly"]
    (schedule,) = nightly["schedules"]
    assert (schedule["cron"], schedule["timezone"]) == ("0 2 * * *", "UTC")
    for each in DEPLOYMENTS:
        assert each["concurrency_limit"] == {"limit": 1, "collision_strategy": "{{ $WHEN_BUSY }}"}
    assert nightly["work_pool"]["name"] == "train-ddp"
    params = TrainParams(**nightly["parameters"]["params"])
    assert params.workload == "prefect_torch_ddp.examples.digits"


@pytest.mark.parametrize(
    "path", sorted((ROOT / "deployments" / "clusters").glob("*.yaml")), ids=lambda path: path.stem
)
def test_cluster_examples_are_accepted(path: Path) -> None:
    """Each example is a value of params.cluster as it stands; its head has the other parameters."""
    text = path.read_text(encoding="utf-8")
    cluster = yaml.safe_load(text)
    assert ClusterParams(**cluster).cluster_kwargs
    assert ("cluster_class" not in cluster) == (path.stem == "local")
    (head,) = re.findall(r"^# params:\n((?:#   .+\n)+)", text, re.MULTILINE)
    others = yaml.safe_load(re.sub("^#", "", head, flags=re.MULTILINE))
    assert others.pop("cluster").startswith("<")
    params = TrainParams(**others, cluster=cluster)
    kwargs = params.cluster.cluster_kwargs
    spec = kwargs.get("custom_cluster_spec", {}).get("spec", {})
    num_workers = kwargs.get("n_workers") or len(kwargs.get("CUDA_VISIBLE_DEVICES", ()))
    assert params.world_size == (num_workers or spec["worker"]["replicas"])
    assert {"workload", "storage"} <= params.model_fields_set


@pytest.mark.parametrize("folder", ["prefect_torch_ddp", "flows", "deployments"])
def test_text_has_the_same_encoding_whatever_the_locale(folder: str) -> None:
    """Each file that is read or written as text names it, or another machine reads other
    words."""
    lacking = []
    for path in (ROOT / folder).rglob("*.py"):
        for call in ast.walk(ast.parse(path.read_bytes())):
            if not isinstance(call, ast.Call):
                continue
            name = getattr(call.func, "attr", getattr(call.func, "id", ""))
            modes = [arg.value for arg in call.args if isinstance(arg, ast.Constant)]
            is_text = name in {"read_text", "write_text"} or (
                name in {"open", "fdopen"} and any(str(mode)[:1] in "rwxa" for mode in modes)
            )
            is_binary = any("b" in str(mode) for mode in modes)
            if is_text and not is_binary and "encoding" not in {key.arg for key in call.keywords}:
                lacking.append(f"{path.name}:{call.lineno}")
    assert not lacking
