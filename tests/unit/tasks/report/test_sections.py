"""What the reports say of the model and the checkpoints."""

import ast

import pytest

from prefect_torch_ddp import TrainParams
from prefect_torch_ddp.tasks.report.report import render_report
from prefect_torch_ddp.tasks.report.sections import checkpoint_list, load_code
from tests.unit.tasks.report.test_report import RECORD, report


def source_of(uri: str) -> str:
    """Return the lines that are shown, without the fence."""
    return "\n".join(load_code("model", uri).splitlines()[1:-1])


def test_a_checkpoint_in_several_roles_is_listed_once_and_its_place_is_no_link() -> None:
    """The model's line comes first, with its card."""
    lines = checkpoint_list(report()).splitlines()
    assert len(lines) == 2
    assert lines[0].endswith(
        "`s3://bucket/runs/r/model.pt`; their card: `s3://bucket/runs/r/model.json`"
    )
    assert lines[1].startswith(
        "- **Evaluated and last checkpoint**, step 400, attempt 2, acc 0.5: `s3://"
    )
    assert "](" not in "".join(lines)


def test_without_a_model_the_report_says_what_to_do() -> None:
    """And shows no code that can't run."""
    markdown = render_report(report(model_uris=None), TrainParams(), RECORD)
    assert "No model was exported: `train` tracked none." in markdown
    assert "load_state_dict" not in markdown
    assert "**Weights**" not in markdown


def test_each_of_several_models_is_shown_with_its_card_and_its_code() -> None:
    """By the name that it was tracked under, as those of a GAN."""
    uris = {name: f"/data/models/000001/{name}.safetensors" for name in ("generator", "critic")}
    markdown = render_report(report(model_uris=uris), TrainParams(), RECORD)
    for name, uri in uris.items():
        assert f"- **Weights** of `{name}`, step 400: `{uri}`" in markdown
        assert f"their card: `/data/models/000001/{name}.json`" in markdown
        assert f"{name}.load_state_dict(safetensors.torch.load_file(file))" in markdown


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize(
    ("uri", "place"),
    [
        ("/data/it's/model", "/data/it's/model"),
        ("file:///data/a%20b/model", "/data/a b/model"),
        ("s3://bucket/model", "s3://bucket/model"),
    ],
)
def test_the_code_that_loads_the_model_is_three_lines_with_the_right_place(
    uri: str, place: str, suffix: str
) -> None:
    """Also of places whose names need quotes, and nothing in a file can run code."""
    source = source_of(uri + suffix)
    assert len(source.splitlines()) == 3
    assert place + suffix in [
        node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)
    ]
    assert ("weights_only=True" in source) == (suffix == ".pt")
