"""Options that several commands share, and `name=value` as JSON or text."""

import difflib
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from prefect_torch_ddp.errors import InvalidParamsError

if TYPE_CHECKING:
    from prefect_torch_ddp.params import TrainParams
    from prefect_torch_ddp.records.run_record import RunRecord
    from prefect_torch_ddp.storage.protocol import Storage

STORAGE = "~/prefect-torch-ddp"

StorageOption = Annotated[
    str, typer.Option(metavar="PLACE", help="A directory, s3://bucket/prefix, or Prefect block.")
]
OptionsOption = Annotated[
    list[str] | None,
    typer.Option("-o", "--option", metavar="NAME=VALUE", help="An option of the workload."),
]
ParamsOption = Annotated[
    list[str] | None,
    typer.Option(
        "-p",
        "--param",
        metavar="NAME=VALUE",
        help="Any other field of TrainParams: checkpoint.every_epochs=1",
    ),
]


def _complete_run(ctx: typer.Context, incomplete: str) -> list[str]:
    ids = run_ids_at(str(ctx.params.get("storage", STORAGE)))
    return [each for each in ids if each.startswith(incomplete)]


RunArgument = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="A run's id, the start of one, or: latest",
        autocompletion=_complete_run,
    ),
]

PYTHONS: Mapping[str, bool | None] = {"True": True, "False": False, "None": None}
"""A text "False" would count as true where a workload asks `if ctx.options["augment"]`."""


def parse_values(given: Sequence[str] | None, flag: str) -> dict[str, Any]:
    """Return `name=value` pairs as a dict; a value that isn't valid JSON is text.

    True, False and None, as Python writes them, are read as such.

    Raises:
        InvalidParamsError: a pair isn't of that form, or a name is given twice.
    """
    values: dict[str, Any] = {}
    for each in given or ():
        name, equals, text = each.partition("=")
        if not equals or not name.strip():
            msg = f"{flag} {each}: write it as name=value"
            raise InvalidParamsError(msg)
        if name in values:
            msg = f"{flag} {name} is given twice"
            raise InvalidParamsError(msg)
        try:
            values[name] = json.loads(text)
        except ValueError:
            values[name] = PYTHONS.get(text, text)
    return values


def refuse_unnamed(given: Sequence[str], command: str, flags: Sequence[str]) -> None:
    """Refuse arguments after the first, and options that the command doesn't have.

    Args:
        given: its arguments and the unknown options, in the order they were typed in.
        command: its name.
        flags: its options.

    Raises:
        InvalidParamsError: there is one. Of `name=value` the message says which option it needs.
    """
    if flag := next((each for each in given if each.startswith("-")), None):
        _refuse_flag(given[given.index(flag) :], flags)
    if pair := next((each for each in given if "=" in each), None):
        prepare = "-d for one of prepare, " if command == "train" else ""
        msg = (
            f"{pair} has no option of the command before it: write -o {pair} for an option of the "
            f"workload, {prepare}-p for a field of TrainParams"
        )
        raise InvalidParamsError(msg)
    if given[1:]:
        msg = (
            f"{given[1]} is one argument too many; write an option of the workload as -o "
            f"name=value; `prefect-torch-ddp {command} -h` shows what else can be given"
        )
        raise InvalidParamsError(msg)


def _refuse_flag(given: Sequence[str], flags: Sequence[str]) -> NoReturn:
    flag, _, value = given[0].partition("=")
    if close := difflib.get_close_matches(flag, flags, 1):
        msg = f"there is no option {flag}; did you mean {close[0]}?"
    else:
        name = flag.lstrip("-").replace("-", "_")
        value = value or next(iter(given[1:]), "VALUE")
        msg = (
            f"there is no option {flag} of the command: write -o {name}={value} for an option of "
            "the workload"
        )
    raise InvalidParamsError(msg)


def nested(values: dict[str, Any], flag: str) -> dict[str, Any]:
    """Return values of dotted names as nested dicts: `checkpoint.every_epochs`.

    Raises:
        InvalidParamsError: a name is given both as a value and as a group.
    """
    found: dict[str, Any] = {}
    for name, value in values.items():
        *groups, last = name.split(".")
        at: Any = found
        for each in groups:
            at = at.setdefault(each, {}) if isinstance(at, dict) else None
        if not isinstance(at, dict) or last in at:
            group = name.partition(".")[0]
            msg = f"{flag} {name}: {group} is given both as a value and as a group; give one"
            raise InvalidParamsError(msg)
        at[last] = value
    return found


def checked_params(values: dict[str, Any]) -> "TrainParams":
    """Return the parameters of a training.

    Raises:
        InvalidParamsError: names each unknown or invalid parameter, and the most similar one.
    """
    from pydantic import ValidationError

    from prefect_torch_ddp.params import TrainParams
    from prefect_torch_ddp.refusals import in_words

    try:
        return TrainParams(**values)
    except ValidationError as error:
        raise InvalidParamsError(in_words(error, TrainParams)) from error


def run_ids_at(storage: str) -> list[str]:
    """Return the ids of all runs of a storage, newest first."""
    from prefect_torch_ddp.records.run_record import run_ids
    from prefect_torch_ddp.tracking.runs import storage_of

    return run_ids(storage_of(storage))


def find_run(storage: "Storage", given: str) -> str:
    """Return the id of a run, given as the whole id, as the start of one, or as `latest`.

    Raises:
        InvalidParamsError: no run fits, or several do; names the ones that fit best.
    """
    from prefect_torch_ddp.records.run_record import run_ids

    ids = run_ids(storage)
    found = ids[:1] if given == "latest" else [each for each in ids if each.startswith(given)]
    if given in ids or len(found) == 1:
        return given if given in ids else found[0]
    if not ids:
        msg = f"there is no run in {storage.uri}; choose another storage with --storage"
    elif found:
        msg = f"{len(found)} runs begin with {given}: {', '.join(found[:5])}; give more of the id"
    else:
        close = difflib.get_close_matches(given, ids, 1)
        hint = f"did you mean {close[0]}?" if close else "`prefect-torch-ddp runs` lists all"
        msg = f"there is no run {given} in {storage.uri}; {hint}"
    raise InvalidParamsError(msg)


def with_its_checkpoint(storage: "Storage", record: "RunRecord") -> "RunRecord":
    """Return a run's record with its newest checkpoint that is there now, or with none.

    The record of a killed process may lack it, and a checkpoint on record may be deleted.

    Raises:
        NewerFormatError: one of the run's checkpoints is of a newer format.
        StorageError: the storage can't be read.
    """
    from prefect_torch_ddp.checkpoint.manifest import checkpoint_ref, list_manifests

    there = list_manifests(storage, record.run_id)
    newest = checkpoint_ref(storage, there[-1]) if there else None
    return record.model_copy(update={"checkpoint": newest})
