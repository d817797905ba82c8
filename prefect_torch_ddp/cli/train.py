"""`train` and `resume`: run `train_flow`, with a Prefect server that is started if needed."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from prefect_torch_ddp.cli.options import (
    STORAGE,
    OptionsOption,
    ParamsOption,
    RunArgument,
    StorageOption,
    checked_params,
    find_run,
    nested,
    parse_values,
    with_its_checkpoint,
)
from prefect_torch_ddp.errors import InvalidParamsError

if TYPE_CHECKING:
    from prefect_torch_ddp.params import TrainParams
    from prefect_torch_ddp.results import TrainReport
    from prefect_torch_ddp.storage.protocol import Storage

DIGITS = "prefect_torch_ddp.examples.digits"
RESUME_FLAGS = {
    "workload": "`prefect-torch-ddp train` for another workload",
    "options": "-o",
    "storage": "--storage",
    "resume_from": "the argument RUN",
}
RUNNING_EXCLUDES = ("cluster_class", "cluster_kwargs", "adapt_kwargs")
EXCLUDED_BY = {
    "address": ("scheduler_file", *RUNNING_EXCLUDES),
    "scheduler_file": ("address", *RUNNING_EXCLUDES),
    "cluster_class": ("address", "scheduler_file"),
}
"""What of a recorded cluster a value that names another one takes the place of."""
TRAIN_FLAGS = {
    "workload": "the first argument",
    "world_size": "--world-size",
    "options": "-o",
    "data_options": "-d",
    "storage": "--storage",
    "source": "--source",
}


def train(
    workload: Annotated[
        str, typer.Argument(metavar="WORKLOAD", help="Module with prepare, train and evaluate.")
    ] = DIGITS,
    world_size: Annotated[
        int, typer.Option("-n", "--world-size", metavar="N", help="How many ranks train together.")
    ] = 2,
    option: OptionsOption = None,
    data_option: Annotated[
        list[str] | None,
        typer.Option("-d", "--data-option", metavar="NAME=VALUE", help="An option of prepare."),
    ] = None,
    param: ParamsOption = None,
    storage: StorageOption = STORAGE,
    source: Annotated[
        str | None, typer.Option(metavar="PLACE", help="Raw data, for prepare.")
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(metavar="URL", help="A running Dask scheduler; default: a local cluster."),
    ] = None,
    cluster_file: Annotated[
        Path | None, typer.Option(metavar="YAML", help="A file of ClusterParams, as for doctor.")
    ] = None,
) -> None:
    """Train and evaluate a workload.

    For example: prefect-torch-ddp train my_workload --world-size 2 -o epochs=3
    """
    given = {
        "workload": workload,
        "world_size": world_size,
        "options": parse_values(option, "-o"),
        "data_options": parse_values(data_option, "-d"),
        "storage": storage,
        "source": source,
        **_cluster(address, cluster_file),
    }
    params = checked_params({**given, **_over(given, _changes(param, TRAIN_FLAGS))})
    print(_trained(params))


def _cluster(address: str | None, cluster_file: Path | None) -> dict[str, Any]:
    """Return the parameter that chooses the cluster, if an option does."""
    if cluster_file is None:
        return {"cluster": {"address": address}} if address else {}
    if address:
        msg = "--address names a running cluster, --cluster-file another: give only one of them"
        raise InvalidParamsError(msg)
    from prefect_torch_ddp.doctor.cluster_file import read_cluster_file

    return {"cluster": read_cluster_file(cluster_file).model_dump(exclude_unset=True)}


def resume(
    run: RunArgument,
    option: OptionsOption = None,
    param: ParamsOption = None,
    storage: StorageOption = STORAGE,
) -> None:
    """Continue a run from its newest checkpoint.

    This starts a new run with the same parameters, except for those given here. With another
    cluster.cluster_class, the recorded cluster_kwargs are left out.
    """
    from prefect_torch_ddp.records.run_record import read_run_record, recorded_dataset
    from prefect_torch_ddp.server import use_server
    from prefect_torch_ddp.tracking.description import recorded_params
    from prefect_torch_ddp.tracking.runs import storage_of

    opened = storage_of(storage)
    run_id = find_run(opened, _latest_of_flow(opened) if run == "latest" else run)
    record = read_run_record(opened, run_id)
    recorded_dataset(record)  # this and what follows is refused before a server is started
    options, changes = parse_values(option, "-o"), _changes(param, RESUME_FLAGS)
    if record.is_finished and not options and not changes:
        msg = f"run {run_id} is completed; say what more to do, e.g. -o epochs=30"
        raise InvalidParamsError(msg)
    cluster = record.parameters.get("cluster")  # a text if it was too long for the record
    was = cluster.get("cluster_class") if isinstance(cluster, dict) else None
    replaced = {
        *_names(changes),
        *_excluded(changes, was),
        *(f"options.{name}" for name in options),
    }
    given_whole = [*_groups(parse_values(param, "-p"))]
    recorded, *_ = recorded_params(opened, run_id, replaced, given_whole)
    use_server()
    from prefect_torch_ddp.tracking.resume import continues_in, how_to_close

    if (flow_run := continues_in(record)) is not None:
        still = f"run {run_id} still trains, is evaluated or waits for a retry; cancel it first"
        msg = f"{still}: {how_to_close(flow_run)}, and resume it again"
        raise InvalidParamsError(msg)
    before = _before(recorded, changes)
    given = {
        **before,
        "options": {**recorded.options, **options},
        "storage": storage,
        # If it saved nothing and began from nothing, it is named itself, and refused.
        "resume_from": with_its_checkpoint(opened, record).continues_from or run_id,
    }
    params = checked_params({**given, **_over(before, changes)})
    print(_trained(params))


def _latest_of_flow(storage: "Storage") -> str:
    """Return the newest run of train_flow, which a task's isn't; `latest` if there is none."""
    from prefect_torch_ddp.records.run_record import list_run_records

    return next((each.run_id for each in list_run_records(storage) if each.is_of_flow), "latest")


def _changes(given: list[str] | None, flags: Mapping[str, str]) -> dict[str, Any]:
    """Return the changes given by `-p`; raises InvalidParamsError if one has its own flag."""
    changes = nested(parse_values(given, "-p"), "-p")
    for name in changes.keys() & flags.keys():
        msg = f"-p {name} can't be given: use {flags[name]}"
        raise InvalidParamsError(msg)
    return changes


def _before(recorded: "TrainParams", changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of the run, without what only its own cluster made of them.

    Nor what a change of the cluster excludes.
    """
    from prefect_torch_ddp.params import ClusterParams

    before = recorded.model_dump(exclude_unset=True)
    if "cluster" in changes and recorded.cluster == ClusterParams():
        before.pop("ranks_per_worker", None)  # there one worker has all ranks
    for name in _excluded(changes, recorded.cluster.cluster_class):
        before.get("cluster", {}).pop(name.removeprefix("cluster."), None)
    return before


def _excluded(changes: Mapping[str, Any], recorded_class: str | None) -> Iterator[str]:
    """Yield the dotted names of what can't be given with the cluster that changes name.

    Nor are the arguments of one class those of another.
    """
    cluster = changes.get("cluster")
    if not isinstance(cluster, dict):
        return
    for name, excluded in EXCLUDED_BY.items():
        if cluster.get(name):
            yield from (f"cluster.{each}" for each in excluded)
    if cluster.get("cluster_class", recorded_class) != recorded_class:
        yield "cluster.cluster_kwargs"


def _over(values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return changes; a group that is changed, at any depth, keeps its other values.

    Only an empty group replaces the whole of it.
    """
    over = {}
    for name, value in changes.items():
        before = values.get(name)
        group = before if isinstance(before, dict) else {}
        is_group = isinstance(value, dict) and bool(value)
        over[name] = {**group, **_over(group, value)} if is_group else value
    return over


def _names(changes: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the dotted names of what changes replace."""
    for name, value in changes.items():
        if isinstance(value, dict) and value:
            yield from _names(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def _groups(typed: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the dotted names of the groups that are given as JSON, not only a value in them."""
    for name, value in typed.items():
        if isinstance(value, dict):
            yield f"{prefix}{name}"
            yield from _groups(value, f"{prefix}{name}.")


def _trained(params: "TrainParams") -> "TrainReport":
    from prefect_torch_ddp.tasks.workload import checked_workload

    checked_workload(params)  # the first of `refuse_early`, without the seconds that Prefect loads
    from prefect_torch_ddp.server import use_server
    from prefect_torch_ddp.tasks.calls.called_flow import refuse_early

    refuse_early(params)  # before a server or a cluster is started
    use_server()
    from prefect_torch_ddp.flow import train_flow

    return train_flow(params)
