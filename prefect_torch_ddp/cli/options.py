"""Options that several commands share, and `name=value` as JSON or text."""

import difflib
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from prefect_torch_ddp.errors import InvalidParamsError

if TYPE_CHECKING:
    from prefect_torch_ddp.params import TrainParams
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
        help="Any other of TrainParams: checkpoint.every_epochs=1",
    ),
]


def _complete_run(ctx: typer.Context, incomplete: str) -> list[str]:
    ids = run_ids_at(str(ctx.params.get("storage", STORAGE)))
    return [each for each in ids if each.startswith(incomplete)]


RunArgument = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="The run's id, the beginning of one, or: latest",
        autocompletion=_complete_run,
    ),
]


def parse_values(given: Sequence[str] | None, flag: str) -> dict[str, Any]:
    """Return `name=value` pairs as a dict; a value is JSON if it can be read so, else text.

    Raises:
        InvalidParamsError: one isn't of that form, or a name is given twice.
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
            values[name] = text
    return values


def nested(values: dict[str, Any], flag: str) -> dict[str, Any]:
    """Return values of dotted names as nested dicts: `checkpoint.every_epochs`.

    Raises:
        InvalidParamsError: a name is that of a value and of a group.
    """
    found: dict[str, Any] = {}
    for name, value in values.items():
        *places, last = name.split(".")
        at: Any = found
        for place in places:
            at = at.setdefault(place, {}) if isinstance(at, dict) else None
        if not isinstance(at, dict) or last in at:
            msg = f"{flag} {name}: {name.partition('.')[0]} is given in two ways"
            raise InvalidParamsError(msg)
        at[last] = value
    return found


def checked_params(values: dict[str, Any]) -> "TrainParams":
    """Return the parameters of a training.

    Raises:
        InvalidParamsError: names each unknown or invalid one, and what may be meant.
    """
    from pydantic import ValidationError

    from prefect_torch_ddp.params import TrainParams
    from prefect_torch_ddp.refusals import in_words

    try:
        return TrainParams(**values)
    except ValidationError as error:
        raise InvalidParamsError(in_words(error, TrainParams)) from error


def run_ids_at(place: str) -> list[str]:
    """Return the ids of all runs of a storage, newest first."""
    from prefect_torch_ddp.records.run_record import run_ids
    from prefect_torch_ddp.tracking.runs import storage_of

    return run_ids(storage_of(place))


def find_run(storage: "Storage", given: str) -> str:
    """Return the id of the run that is meant: whole, by its beginning, or the latest.

    Raises:
        InvalidParamsError: there is none, or there are several; names those that may be meant.
    """
    from prefect_torch_ddp.records.run_record import run_ids

    ids = run_ids(storage)
    found = ids[:1] if given == "latest" else [each for each in ids if each.startswith(given)]
    if given in ids or len(found) == 1:
        return given if given in ids else found[0]
    if not ids:
        msg = f"there is no run in {storage.uri}; --storage names another place"
    elif found:
        msg = f"{len(found)} runs begin with {given}: {', '.join(found[:5])}"
    else:
        close = difflib.get_close_matches(given, ids, 1)
        hint = f"did you mean {close[0]}?" if close else "`prefect-torch-ddp runs` shows them"
        msg = f"there is no run {given} in {storage.uri}; {hint}"
    raise InvalidParamsError(msg)
