"""Each public name opens, and exactly the intended names are public."""

import ast
import re
from pathlib import Path

import pytest

import prefect_torch_ddp
from prefect_torch_ddp import errors

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


EXAMPLES = [*ROOT.glob("flows/*.py"), *ROOT.glob("prefect_torch_ddp/examples/*.py")]


@pytest.mark.parametrize("page", [ROOT / "README.md", *EXAMPLES], ids=lambda page: page.name)
def test_examples_import_public_names_alone(page: Path) -> None:
    """README and examples import only from the package itself, or from its topic `data`."""
    source = page.read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", source, re.MULTILINE | re.DOTALL)
    for block in blocks if page.suffix == ".md" else [source]:
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith(DOORS[0]):
                assert node.module in (*DOORS, "prefect_torch_ddp.examples.options")


def test_an_unknown_name_is_an_attribute_error() -> None:
    """A typo says which name of which module; hasattr works."""
    unknown = r"module 'prefect_torch_ddp' has no attribute 'train_folw'"
    with pytest.raises(AttributeError, match=unknown):
        prefect_torch_ddp.train_folw  # noqa: B018
    assert not hasattr(prefect_torch_ddp, "nothing")
