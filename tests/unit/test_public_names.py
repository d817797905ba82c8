"""Each public name opens, and exactly the intended names are public."""

import ast
import inspect
import pickle
import pydoc
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import FunctionType

import cloudpickle
import pytest

import prefect_torch_ddp
from prefect_torch_ddp import CheckpointParams, TrainParams, errors

ROOT = Path(__file__).parents[2]
PUBLIC = set(prefect_torch_ddp.__all__)
DOORS = ("prefect_torch_ddp", "prefect_torch_ddp.data")


def test_every_public_name_opens_and_nothing_is_public_by_accident() -> None:
    """Each name gives the object of that name, and otherwise only submodules are visible."""
    for name in PUBLIC:
        opened = getattr(prefect_torch_ddp, name)
        assert getattr(opened, "__name__", name) in {name, "train_flow"}
    others = {name for name in vars(prefect_torch_ddp) if not name.startswith("_")} - PUBLIC
    folder = Path(prefect_torch_ddp.__file__).parent
    assert all((folder / name).is_dir() or (folder / f"{name}.py").exists() for name in others)
    assert dir(prefect_torch_ddp) == sorted(PUBLIC)


def test_every_error_that_a_public_docstring_names_is_public() -> None:
    """A caller can catch by a name of the package itself what the docstrings announce."""
    named: set[str] = set()
    for name in PUBLIC:
        opened = getattr(prefect_torch_ddp, name)
        for member in (opened, *vars(opened).values()) if isinstance(opened, type) else (opened,):
            named |= set(re.findall(r"\b([A-Z]\w+Error): ", getattr(member, "__doc__", "") or ""))
    ours = {name for name in named if hasattr(errors, name)}
    assert len(ours) > 10
    assert ours <= PUBLIC


PAGES = [
    ROOT / "README.md",
    *(ROOT / name for name in ("CONTRIBUTING.md", "deployments/README.md", "tests/README.md")),
    *ROOT.glob("docs/**/*.md"),
]
EXAMPLES = [*ROOT.glob("flows/*.py"), *ROOT.glob("prefect_torch_ddp/examples/*.py")]
BLOCK = re.compile(r"^( *)```python.*\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
OPEN = r"prefect_torch_ddp\.(data|examples(\.\w+)?|integrations\.\w+)"
"""Modules that a program may import in addition to the package itself."""


def _blocks(page: Path) -> Iterator[str]:
    """Yield the Python of a page, without a notebook's own commands."""
    for indent, block in BLOCK.findall(page.read_text(encoding="utf-8")):
        lines = block.splitlines()[block.startswith("%%") :]
        yield "\n".join(line.removeprefix(indent) for line in lines)


@pytest.mark.parametrize("path", [*PAGES, *EXAMPLES], ids=lambda path: path.name)
def test_programs_import_only_public_names(path: Path) -> None:
    """Each block of Python on the pages is whole statements; it and the examples import nothing
    private."""
    is_page = path.suffix == ".md"
    for source in _blocks(path) if is_page else [path.read_text(encoding="utf-8")]:
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            else:
                modules = [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            for module in modules:
                is_ours = module.partition(".")[0] == DOORS[0]
                assert not is_ours or module == DOORS[0] or re.fullmatch(OPEN, module), module
            if isinstance(node, ast.ImportFrom) and node.module in DOORS:
                public = import_module(str(node.module)).__all__
                assert {alias.name for alias in node.names} <= set(public)


CODE = {
    f"{door}.{name}": getattr(import_module(door), name)
    for door in DOORS
    for name in import_module(door).__all__
    if name != "__version__"
}
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in (ROOT / "prefect_torch_ddp").rglob("*.py")
}
SHOWN = {*DOORS, "prefect_torch_ddp.examples", "prefect_torch_ddp.examples.digits"}
"""Modules that `help` may show: the doors, and the workload that is the default."""


@pytest.mark.parametrize("name", CODE)
def test_help_shows_only_what_can_be_imported(name: str) -> None:
    """No signature, base class or default in `help(name)` is of a private module. A flow's module
    is shown: it is the entrypoint of deployments."""
    shown = pydoc.render_doc(CODE[name], renderer=pydoc.plaintext)
    allowed = {*SHOWN, CODE[name].__module__} if name.endswith("_flow") else SHOWN
    for path in re.findall(r"prefect_torch_ddp(?:\.\w+)*", shown):
        parents = path.split(".")
        prefixes = {".".join(parents[: i + 1]) for i in range(len(parents))}
        assert not prefixes & (MODULES - allowed), path


@pytest.mark.parametrize("name", [name for name in CODE if not name.endswith("_flow")])
def test_a_public_name_is_pickled_by_its_package(name: str) -> None:
    """A pickle names the package, and gives the same object; a function's source is found."""
    value, (door, _, own) = CODE[name], name.rpartition(".")
    if (door, own) in {(DOORS[0], each) for each in import_module(DOORS[1]).__all__}:
        door = DOORS[1]  # both export it
    assert (value.__module__, value.__qualname__) == (door, own)
    for module in (pickle, cloudpickle):
        assert pickle.loads(module.dumps(value)) is value
    if isinstance(value, FunctionType):
        assert f"def {own}(" in inspect.getsource(value)


@pytest.mark.parametrize("door", DOORS)
def test_each_name_of_a_stub_says_its_package(door: str) -> None:
    """Also a base class that isn't public, from the moment when its own module is loaded."""
    stub = Path(str(import_module(door).__file__)).with_suffix(".pyi")
    for node in ast.parse(stub.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom) and node.module not in DOORS:
            for name in (alias.name for alias in node.names):
                value = vars(import_module(str(node.module)))[name]
                assert not isinstance(value, type | FunctionType) or value.__module__ == door, name


def test_parameters_and_results_can_be_derived_and_copied() -> None:
    """A class that a user derives from a public model is validated, pickled and shown as usual."""

    class OwnParams(TrainParams):
        """Parameters of a flow."""

        patience: "int | None" = None
        """Epochs."""

    params = OwnParams(world_size=3, patience=2)
    assert params.model_copy(update={"patience": 1}).patience == 1
    assert OwnParams.model_validate_json(params.model_dump_json()) == params
    assert (
        OwnParams.model_json_schema()["properties"]["retry_delay_s"]["title"]
        == (TrainParams.model_json_schema()["properties"]["retry_delay_s"]["title"])
    )
    given = TrainParams(checkpoint=CheckpointParams(every_steps=2))
    assert pickle.loads(pickle.dumps(given)) == given


def test_an_unknown_name_is_an_attribute_error() -> None:
    """A typo says which name of which module; hasattr works."""
    unknown = r"module 'prefect_torch_ddp' has no attribute 'train_folw'"
    with pytest.raises(AttributeError, match=unknown):
        prefect_torch_ddp.train_folw  # noqa: B018
    assert not hasattr(prefect_torch_ddp, "nothing")
