"""Owns what `RankContext.local()` needs in place of a gang."""

import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from prefect_torch_ddp.checkpoint.attempts import claim_attempt, newest_attempt
from prefect_torch_ddp.checkpoint.source import source_of
from prefect_torch_ddp.data.place import readable_at
from prefect_torch_ddp.rank.config import RankConfig, check_virtual_ranks
from prefect_torch_ddp.rank.seeding import seed_stage
from prefect_torch_ddp.storage.directory import DirectoryStorage
from prefect_torch_ddp.storage.locate import storage_from_uri
from prefect_torch_ddp.storage.protocol import Storage


def local_config(storage: Storage | str | Path | None, **config: Any) -> tuple[RankConfig, TemporaryDirectory[str] | None]:
    """Describe a run of one rank in this process, claim its next attempt where it trains, and seed the process.

    Returns:
        The description, and the temporary folder to clean up where no storage was given.
    """
    check_virtual_ranks(config["determinism"], config["virtual_ranks"], world_size=1)
    temporary = None
    if storage is None:
        temporary = TemporaryDirectory(prefix="prefect-torch-ddp-")
        storage = temporary.name
    where = DirectoryStorage(Path(storage)) if isinstance(storage, str | os.PathLike) else storage
    seed_stage(config["seed"], config["stage"])
    if isinstance(config["resume_from"], str):
        config["resume_from"] = source_of(config["resume_from"], where, storage_from_uri)
    if config.get("source") is not None:
        config["source"], _ = readable_at(config["source"])
    # Only a training is an attempt: who evaluates a checkpoint of a run, or prepares data for it, must not end one that is alive.
    trains = config["stage"] in ("train", "task")
    attempt = claim_attempt(where, config["run_id"]) if trains else max(newest_attempt(where, config["run_id"]), 1)
    return RankConfig(attempt=attempt, storage=where, **config), temporary
