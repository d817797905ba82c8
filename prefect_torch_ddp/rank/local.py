"""A rank in this process, for `RankContext.local`: its options, its attempt, its seeds."""

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypedDict, get_args

from pydantic import ValidationError

from prefect_torch_ddp.checkpoint.attempts import claim_attempt, newest_attempt
from prefect_torch_ddp.checkpoint.resume_point import ResumePoint, parse_resume_from
from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.lazy import exported_by
from prefect_torch_ddp.params import CheckpointParams, Determinism, check_virtual_ranks
from prefect_torch_ddp.rank.assembly import ContextAssembly
from prefect_torch_ddp.rank.config import RankConfig, RankInfo, Stage
from prefect_torch_ddp.rank.user_code import default_to_fork
from prefect_torch_ddp.refusals import in_words, unknown
from prefect_torch_ddp.storage.locate import (
    as_readable,
    source_from_uri,
    storage_at,
    storage_from_uri,
)
from prefect_torch_ddp.storage.names import is_folder_name
from prefect_torch_ddp.storage.protocol import Readable, Storage


@exported_by("prefect_torch_ddp")
class LocalOptions(TypedDict, total=False):
    """Keyword arguments of `RankContext.local`.

    Example:
        A helper for your tests:

            from typing import Unpack
            from prefect_torch_ddp import LocalOptions, RankContext

            def small_context(**chosen: Unpack[LocalOptions]) -> RankContext:
                return RankContext.local(options={"epochs": 1}, **chosen)

            with small_context(ledger=True) as ctx:
                print(ctx.world_size)
    """

    run_id: str
    """Name of the run's folder, without slashes; with the same name the run resumes. Default:
    "local"."""
    stage: Stage
    """"evaluate" restores the checkpoint of `restore_step`, or the newest one. Default: "train"."""
    checkpoint: CheckpointParams | Mapping[str, Any] | None
    """When checkpoints are written, and which are kept; a dict has the fields by name."""
    resume_from: str | None
    """Run from whose checkpoint to start: its id, or `<path or s3:// URI of its
    storage>/runs/<id>`; append `/checkpoints/step-00000400` for a certain checkpoint."""
    restore_step: int | None
    """See stage."""
    determinism: Determinism
    """"elastic" gives the same weights, to the last bit, as any number of ranks that divides
    `virtual_ranks`."""
    virtual_ranks: int | None
    """See determinism."""
    ledger: bool
    """Record which samples each step trains on; `read_ledger` checks it."""
    source: Readable | str | Path | None
    """The value of `ctx.source`: a storage, a path or an s3:// URI."""


def local_assembly(
    data: str | Path | None,
    options: Mapping[str, Any] | None,
    seed: int,
    storage: Storage | str | Path | None,
    chosen: LocalOptions,
) -> ContextAssembly:
    """Assemble one rank's context here, as `RankContext.local` says; claim an attempt, seed."""
    from prefect_torch_ddp.rank.generators import seed_stage  # noqa: PLC0415 - loads torch

    strangers = sorted(chosen.keys() - LocalOptions.__annotations__.keys())
    if strangers:  # before an attempt is claimed
        msg = f"RankContext.local() got an unexpected keyword argument {strangers[0]!r}"
        raise TypeError(msg)
    given = {name: value for name, value in chosen.items() if value is not None}
    config: dict[str, Any] = {"run_id": "local", "stage": "train", **given}
    _check_run_id(config["run_id"])
    if config["stage"] not in (stages := get_args(Stage)):
        msg = f"{unknown(config['stage'], stages, 'stage')} (there are {', '.join(stages)})"
        raise InvalidParamsError(msg)
    check_virtual_ranks(config.get("determinism", "default"), config.get("virtual_ranks"))
    if "restore_step" in config and config["stage"] != "evaluate":
        msg = (
            f"restore_step is {config['restore_step']} in the stage {config['stage']!r}, and names "
            "the checkpoint of an evaluation; give stage='evaluate', or "
            "resume_from='<run>/checkpoints/step-...'"
        )
        raise InvalidParamsError(msg)
    config["checkpoint"] = _checkpoint_params(config.get("checkpoint", {}))
    step, temporary = config.pop("restore_step", None), None
    if storage is None:
        temporary = TemporaryDirectory(prefix="prefect-torch-ddp-")
        storage = temporary.name
    where = storage_at(storage)
    if step is not None:
        config["restore"] = ResumePoint(where, config["run_id"], step)
    if isinstance(config.get("resume_from"), str):
        config["resume_from"] = parse_resume_from(config["resume_from"], where, storage_from_uri)
    if "source" in config:
        given = config["source"]
        config["source"] = (
            source_from_uri(str(given)) if isinstance(given, str | Path) else as_readable(given)
        )
    default_to_fork()
    seed_stage(seed, config["stage"])
    # Only a training is an attempt: who evaluates a checkpoint of a run, or prepares data for
    # it, must not end one that is alive.
    trains = config["stage"] in ("train", "task")
    run = (where, config["run_id"])
    attempt = claim_attempt(*run) if trains else max(newest_attempt(*run), 1)
    config |= {"attempt": attempt, "storage": where, "options": dict(options or {}), "seed": seed}
    folder = None if data is None else Path(data)
    assembly = ContextAssembly(RankConfig(**config), RankInfo(), folder=folder)
    assembly.temporary = temporary
    return assembly


def _check_run_id(run_id: object) -> None:
    if not isinstance(run_id, str) or not is_folder_name(run_id):
        msg = f"run_id is {run_id!r}, and it names one folder: write it like run_id='first-try'"
        raise InvalidParamsError(msg)


def _checkpoint_params(given: CheckpointParams | Mapping[str, Any]) -> CheckpointParams:
    try:
        return CheckpointParams.model_validate(given)
    except ValidationError as error:
        msg = f"RankContext.local's checkpoint: {in_words(error, CheckpointParams)}"
        raise InvalidParamsError(msg) from error
