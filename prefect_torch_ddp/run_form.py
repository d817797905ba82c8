"""How a parameter model looks in Prefect's run form: its JSON schema with titles and an order.

Both of Prefect's UIs make the form of the schema. A title or a description with a backtick or an
angle bracket is shown as it stands or swallowed, `position` is the only order, and a group is a
model within a model. A fixed field needs both `const`, by which one UI makes it read-only, and an
`enum` of one value, of which the other makes a list with one choice.
"""

import inspect
import re
from typing import Any

from pydantic import BaseModel

TITLES = {
    "workload": "Workload",
    "world_size": "Ranks",
    "options": "Options of the workload",
    "data_options": "Options of the data",
    "source": "Raw data",
    "storage": "Storage",
    "resume_from": "Resume from",
    "seed": "Seed",
    "checkpoint": "Checkpoints",
    "cluster": "Cluster",
    "evaluate_on": "Checkpoint to evaluate",
    "retries": "Retries by Prefect",
    "retry_delay_s": "Wait before a retry (seconds)",
    "max_restarts": "Immediate restarts",
    "ranks_per_worker": "Ranks on each worker",
    "backend": "Collectives library",
    "min_world_size": "Smallest number of ranks",
    "max_world_size": "Largest number of ranks",
    "workers_timeout_s": "Wait for workers (seconds)",
    "queue_timeout_s": "Wait for busy workers (seconds)",
    "rendezvous_timeout_s": "Wait of ranks for one another (seconds)",
    "collective_timeout_s": "Time limit of a collective (seconds)",
    "progress_timeout_s": "Time without progress (seconds)",
    "stop_grace_s": "Time to stop and save (seconds)",
    "resources": "Dask resources",
    "interface": "Network of the ranks",
    "launcher": "How ranks start",
    "preload": "Packages to load once",
    "determinism": "Determinism",
    "virtual_ranks": "Virtual ranks",
    "ledger": "Record the samples of each step",
    "trackers": "Experiment trackers",
    "every_s": "Checkpoint every (seconds)",
    "every_steps": "Checkpoint every (steps)",
    "every_epochs": "Checkpoint every (epochs)",
    "keep_last": "Keep the newest",
    "keep_best": "Keep the best",
    "best_metric": "Metric that says which is best",
    "best_mode": "Best value",
    "on_failure": "If one can't be written",
    "compare_replicas": "Compare the ranks' weights",
    "address": "Address of the scheduler",
    "scheduler_file": "File of the scheduler",
    "cluster_class": "Cluster class",
    "cluster_kwargs": "Arguments of the cluster",
    "adapt_kwargs": "Arguments of adapt",
}
"""Of the fields that `params` declares."""

UNITS = {"s": "seconds", "bytes": "bytes"}
WORDS = {"num": "number of", "lr": "learning rate"}
"""What a part of a field's name means, in models of others."""

KINDS = {
    "array": "List",
    "boolean": "Yes or no",
    "integer": "Number",
    "null": "Empty",
    "number": "Number",
    "object": "Names and values",
    "string": "Text",
}
"""What the form calls the values that a field may have."""


OPTIONS_HEADING, EXAMPLE_HEADING = "Options:", "Example:"
"""The lines of a model's docstring after which `help` lists its options and has an example; the
form has neither."""

OTHERS = "From here on: fields that few people change."
"""Begins the description of the first field that isn't one of `first_in_form`. A group would need a
model of its own, and `params` would have these fields in another place."""


def arrange(schema: dict[str, Any], model: type[BaseModel]) -> None:
    """Give a model's JSON schema what the run form shows, in place.

    Fields come in the order of `model.first_in_form`, then a class's own before its base's. The
    first of the latter says that they are the others.
    """
    explicit = model.model_config.get("title")
    schema["title"] = explicit or _words(model.__name__.removesuffix("Params") or "Parameters")
    fields = schema.get("properties", {})
    for position, name in enumerate(_in_order(fields, model)):
        field = fields[name]
        field["position"] = position
        field["title"] = model.model_fields[name].title or title_of(name, model)
        for each in (field, *field.get("anyOf", ())):
            if "const" in each:
                each["enum"] = [each["const"]]
        for each in field.get("anyOf", ()):
            if "$ref" not in each:
                each["title"] = str(each.get("const", KINDS.get(each.get("type", ""), "Value")))
    for each in (schema, *fields.values()):
        if "description" in each:
            text = summary_of(each["description"])
            each["description"] = " ".join(text.replace("`", "").split())


def _in_order(fields: dict[str, Any], model: type[BaseModel]) -> list[str]:
    """Return the fields' names in the order of the form; mark where the rarely changed begin."""
    own_first = (name for base in model.__mro__ for name in inspect.get_annotations(base))
    firsts = getattr(model, "first_in_form", ())
    names = [name for name in dict.fromkeys([*firsts, *own_first]) if name in fields]
    if 0 < len(firsts) < len(names):
        first_of_others = fields[names[len(firsts)]]
        first_of_others["description"] = f"{OTHERS} {first_of_others.get('description', '')}"
    return names


def summary_of(text: str) -> str:
    """Return a docstring without its example and options."""
    headings = f"\n(?:{EXAMPLE_HEADING}|{OPTIONS_HEADING})\n"
    return re.split(headings, inspect.cleandoc(text))[0].strip()


def title_of(name: str, model: type[BaseModel]) -> str:
    """Return what the form calls a field: `retry_delay_s` is "Wait before a retry (seconds)"."""
    bases = (base for base in model.__mro__ if base.__module__ == "prefect_torch_ddp")
    if name in TITLES and any(name in inspect.get_annotations(base) for base in bases):
        return TITLES[name]
    return _words(name)


def _words(name: str) -> str:
    """Return a name as words: `num_workers` is "Number of workers", `idle_s` "Idle (seconds)"."""
    *parts, last = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().split("_")
    unit = f" ({UNITS[last]})" if parts and last in UNITS else ""
    words = " ".join(WORDS.get(part, part) for part in (parts if unit else [*parts, last]))
    return f"{words[:1].upper()}{words[1:]}{unit}"
