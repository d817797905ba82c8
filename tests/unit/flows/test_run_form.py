"""The run forms: what Prefect makes of the flows' parameters, as both of its UIs show it."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
from prefect.utilities.callables import parameter_schema
from pydantic import Field

from flows.deployed import cifar10, digits, gridded, land_use, pet_names, tabular
from prefect_torch_ddp import Params, evaluate_flow, train_flow
from prefect_torch_ddp.params import TrainParams
from prefect_torch_ddp.run_form import OTHERS

EXAMPLES = [digits, cifar10, pet_names, land_use, gridded, tabular]
FLOWS = [train_flow, evaluate_flow, *EXAMPLES]
FIRST = [
    "workload",
    "world_size",
    "options",
    "data_options",
    "source",
    "storage",
    "resume_from",
    "seed",
    "checkpoint",
    "cluster",
]


def schema_of(flow: Any) -> dict[str, Any]:
    """Return what a deployment of the flow has the form made of."""
    return parameter_schema(flow.fn).model_dump_for_openapi()


def parts(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield each part of a schema that may have a title or a description."""
    if isinstance(schema, dict):
        yield schema
        for name, part in schema.items():
            if name not in ("default", "enum", "required"):
                yield from parts(part)
    if isinstance(schema, list):
        for part in schema:
            yield from parts(part)


def models(schema: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the properties of each model, in the order in which the form has them."""
    return {
        name: dict(sorted(each["properties"].items(), key=lambda field: field[1]["position"]))
        for name, each in schema.get("definitions", {}).items()
    }


@pytest.mark.parametrize("flow", FLOWS, ids=lambda flow: flow.fn.__name__)
def test_no_text_of_a_form_is_swallowed_or_marked_up(flow: Any) -> None:
    """One UI drops what is in angle brackets, the other one shows backticks."""
    texts = [
        part[key]
        for part in parts(schema_of(flow))
        for key in ("title", "description")
        if isinstance(part.get(key), str)
    ]
    assert len(texts) > 20
    assert not [text for text in texts if re.search(r"[<>`*]", text)]


@pytest.mark.parametrize("flow", FLOWS, ids=lambda flow: flow.fn.__name__)
def test_titles_are_plain_words(flow: Any) -> None:
    """Neither names of classes nor of fields, and each field of a model says what it is."""
    schema = schema_of(flow)
    plain = re.compile(r"[A-Z][a-z0-9']*( [A-Za-z][a-z']*)*( \((seconds|bytes|steps|epochs)\))?")
    for name, fields in models(schema).items():
        titles = [each.get("title", "") for each in fields.values()]
        assert all(plain.fullmatch(title) for title in titles), (name, titles)
        assert len(set(titles)) == len(titles), name
        assert plain.fullmatch(schema["definitions"][name]["title"]), name
        assert list(range(len(fields))) == [each["position"] for each in fields.values()], name
    shapes = [
        shape for part in parts(schema) for shape in part.get("anyOf", ()) if "$ref" not in shape
    ]
    assert all(shape.get("title") for shape in shapes) or flow is evaluate_flow, shapes


def test_each_field_of_a_run_is_explained() -> None:
    """Its description is what the manual says of the option, without marks."""
    for name, fields in models(schema_of(train_flow)).items():
        assert all(each.get("description") for each in fields.values()), name
    described = models(schema_of(train_flow))["TrainParams"]["resume_from"]["description"]
    assert "s3://bucket/prefix/runs/ID; append /checkpoints/step-00000400" in described


def test_what_people_touch_comes_first() -> None:
    """Ten fields come first, then all others together, also in a workload's form."""
    for flow, name in ((train_flow, "TrainParams"), (digits, "DigitsParams")):
        fields = models(schema_of(flow))[name]
        assert list(fields)[:10] == FIRST
        assert set(fields) == set(TrainParams.model_fields)
        marked = [each for each in fields if fields[each].get("description", "").startswith(OTHERS)]
        assert marked == [list(fields)[10]], "the first of the others says so"


@pytest.mark.parametrize("flow", EXAMPLES)
def test_a_fixed_field_offers_one_value(flow: Any) -> None:
    """`const` makes one UI show it only; the other one has a list of what `enum` names."""
    schema = schema_of(flow)
    fixed = [part for part in parts(schema) if "const" in part]
    assert all(part["enum"] == [part["const"]] for part in fixed)
    (workload,) = (fields["workload"] for fields in models(schema).values() if "workload" in fields)
    assert workload["const"] == workload["default"]


def test_options_of_ones_own_have_words_for_titles() -> None:
    """Made of the names, with the units that these end with; an explicit title is kept."""

    class MyOptions(Params):
        num_layers: int = 2
        idle_s: float | None = None
        lr: float = 0.1
        address: str = Field(default="", title="Where to")

    schema = MyOptions.model_json_schema()
    titles = {name: field["title"] for name, field in schema["properties"].items()}
    assert schema["title"] == "My options"
    assert titles == {
        "num_layers": "Number of layers",
        "idle_s": "Idle (seconds)",
        "lr": "Learning rate",
        "address": "Where to",
    }
