"""Restoring: the choice of the checkpoint to resume from, and its way into the tracked objects."""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from inspect import signature
from pathlib import Path
from typing import Any, Self

import torch
from torch.optim.lr_scheduler import LRScheduler

from prefect_torch_ddp.checkpoint.attempts import (
    had_ended,
    refuse_superseded,
    refuse_unseen,
    write_resume,
)
from prefect_torch_ddp.checkpoint.files import fetch_files, refuse_folder
from prefect_torch_ddp.checkpoint.keys import FROM_NOTHING, CheckpointId, checkpoints_prefix
from prefect_torch_ddp.checkpoint.manifest import (
    Manifest,
    ManifestObject,
    live_manifests,
    read_manifest,
)
from prefect_torch_ddp.checkpoint.rank_store import KeyValueStore
from prefect_torch_ddp.checkpoint.resume_point import ResumePoint
from prefect_torch_ddp.checkpoint.shard import GENERATORS
from prefect_torch_ddp.checkpoint.state.objects import read_state, read_states
from prefect_torch_ddp.checkpoint.state.own_state import OwnState
from prefect_torch_ddp.checkpoint.state.serial import (
    RATES,
    changed_options,
    group_options,
    load_state,
    put_options,
    restore_generators,
)
from prefect_torch_ddp.errors import CheckpointError, NewerFormatError
from prefect_torch_ddp.storage.protocol import Storage

Found = tuple[Manifest, dict[str, Any]]
"""A checkpoint that verifies, with its states by name."""

_MAX_LOOKS = 10
"""How often a run's checkpoints are listed if those that were listed can't be read."""

logger = logging.getLogger(__name__)


@dataclass
class Restorer:
    """Restores objects in place from one checkpoint; if there is none, leaves them unchanged."""

    storage: Storage
    checkpoint: Manifest | None
    states: dict[str, Any] = field(default_factory=dict)
    """What was read already, by name."""
    is_ours: bool = True
    """Whether it is of the run that resumes, and must have everything."""
    had_ended: bool = False
    """Whether it holds what the function left at its end."""
    only_weights: bool = False
    """Whether it gives modules their state, and there is nothing to resume."""
    restored: set[str] = field(default_factory=set)
    """The names of the objects that got their state from it."""
    options: dict[str, tuple[Any, list[dict[str, Any]]]] = field(default_factory=dict)
    """The optimizers among them, by name, each with the options that its groups got."""
    chosen: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """By name, the options of optimizers' groups that user code set before the first step."""

    @property
    def manifest(self) -> Manifest | None:
        """What is resumed."""
        return None if self.only_weights else self.checkpoint

    @property
    def left(self) -> frozenset[str]:
        """The names of its models, or of all its objects if it has none, if none was restored."""
        objects = () if self.checkpoint is None else self.checkpoint.objects
        own = [each for each in objects if each.object != GENERATORS and each.path is None]
        names = {each.object for each in own if each.is_module} or {each.object for each in own}
        return frozenset() if names & self.restored else frozenset(names)

    @classmethod
    def choose(
        cls,
        own: ResumePoint,
        attempt: int,
        resume_from: ResumePoint | None,
        rank_store: KeyValueStore,
        into: Path | None = None,
    ) -> Self:
        """Restore, on rank 0, from the newest checkpoint that verifies; tell the other ranks.

        A run without its own checkpoint begins from `resume_from`. The attempt's resume
        record is written. With `into` the checkpoints are folders, whose files are put there.

        Raises:
            CheckpointError: there are checkpoints and none can be restored.
            NewerFormatError: a checkpoint, or a record of the run, is of a newer format.
            StorageError: the storage failed, or lacks the attempt's claim: it isn't the run's.
            SupersededError: a newer attempt may have deleted what this one was about to read.
        """
        refuse_unseen(own.storage, own.run_id, attempt)
        where = own
        try:
            found = find_resumable(own.storage, own.run_id, into)
            if found is None and resume_from is not None:
                where, found = resume_from, _read_resume_point(resume_from, into)
        except (CheckpointError, NewerFormatError):
            refuse_superseded(own.storage, own.run_id, attempt)
            raise
        manifest, states = found or (None, {})
        is_ours, weights = where is own, where.only_weights
        chosen = cls(where.storage, manifest, states, is_ours=is_ours, only_weights=weights)
        at = None if manifest is None else manifest.id
        if manifest is not None:
            elsewhere = f", {where.uri}" if where.storage != own.storage else ""
            text = "starting with the weights of" if weights else "resuming from"
            text += " the checkpoint of step %d of run %s%s"
            logger.info(text, manifest.step, manifest.run_id, elsewhere)
        resumed = None if weights else at
        if resumed is not None:
            chosen.had_ended = had_ended(where.storage, where.run_id, resumed)
        begun = resumed or FROM_NOTHING
        if not is_ours:
            begun = CheckpointId(begun.step, attempt=0)
        write_resume(own.storage, own.run_id, attempt, begun)
        # An attempt claimed after this check sees the record. One claimed before may have missed
        # it, and this attempt's steps would stay in metrics and ledger.
        refuse_superseded(own.storage, own.run_id, attempt)
        choice = {"at": at, "is_ours": is_ours, "had_ended": chosen.had_ended}
        rank_store.set("resume", json.dumps(choice))
        return chosen

    @classmethod
    def follow(
        cls,
        own: ResumePoint,
        resume_from: ResumePoint | None,
        rank_store: KeyValueStore,
        into: Path | None = None,
    ) -> Self:
        """Restore from what rank 0 chose; CheckpointError: it chose none, or it is damaged."""
        text = rank_store.wait_for("resume", rank=0)
        if text is None:
            what = "tracked nothing; ctx.track belongs"
            if into is not None:
                what = "asked for no ctx.checkpoint_folder; it belongs"
            msg = f"rank 0 of run {own.run_id} {what} on every rank"
            raise CheckpointError(msg)
        choice = json.loads(text)
        at = choice.pop("at")
        where = own if choice["is_ours"] else resume_from
        assert where is not None
        manifest = None if at is None else read_manifest(where.storage, where.run_id, *at)
        if manifest is not None and into is not None:
            fetch_files(where.storage, manifest, into)
        return cls(where.storage, manifest, only_weights=where.only_weights, **choice)

    def restore(self, name: str, item: Any) -> None:
        """Load a tracked object's state in place; CheckpointError: it lacks, or doesn't fit."""
        manifest = self.manifest
        if manifest is None and isinstance(item, torch.nn.Module):
            manifest = self.checkpoint
        if manifest is None:
            return
        what = f"checkpoint of step {manifest.step} of run {manifest.run_id}"
        is_own = isinstance(item, OwnState)
        found = find_own(manifest, name, item) if is_own else manifest.find(name)
        if found is None:
            if is_own and item.begins_anew and (num := manifest.num_owners(name)):
                text = "%r starts over: the %s has the states of %d ranks, and here are %d"
                logger.warning(text, name, what, num, item.world_size)
                return
            there = ", ".join(item.name for item in manifest.objects)
            msg = f"the {what} has no object {name!r}; it has {there}"
            if self.is_ours:
                raise CheckpointError(msg)
            logger.warning("%s: it keeps its initial state", msg)
            return
        state = self._take(manifest, found)
        try:
            if isinstance(item, LRScheduler) and not self.is_ours:
                _warn_of_options(name, item, state)
            load_state(item, state)
            self.restored.add(name)
            self._keep_rates(name, item)
        except Exception as error:  # user classes refuse in every way
            msg = f"the {what} doesn't fit the tracked object {name!r}: {error}"
            raise CheckpointError(msg) from error

    def _keep_rates(self, name: str, item: Any) -> None:
        """Undo what a scheduler did to its restored optimizer if it was made after that."""
        if options := group_options(item):
            self.options[name] = item, options
        if not isinstance(item, LRScheduler):
            return
        for whose, (optimizer, given) in self.options.items():
            rates = [{each: group[each] for each in RATES & group.keys()} for group in given]
            if optimizer is item.optimizer and (changed := put_options(optimizer, rates)):
                logger.info(
                    "%r has the checkpoint's %s again: the scheduler %r was made after ctx.track "
                    "had restored it, and had set %s. Set values of your own after the last "
                    "ctx.track",
                    *(whose, ", ".join(changed), name, "it" if len(changed) == 1 else "them"),
                )

    def note_chosen_options(self) -> None:
        """Keep what user code has set in optimizers' groups since they were restored.

        A run that resumes itself has that in its checkpoint, and what it set later.
        """
        if not self.is_ours:
            self.chosen = {
                name: changed_options(item, given) for name, (item, given) in self.options.items()
            }

    def drop_replaced_options(self) -> None:
        """Forget those that later code has changed: the checkpoint has what it set."""
        for name, chosen in self.chosen.items():
            replaced = changed_options(self.options[name][0], chosen)
            for options, other in zip(chosen, replaced, strict=False):
                for each in options.keys() & other.keys():
                    del options[each]

    def put_chosen_options(self) -> None:
        """Set the chosen options again, after the optimizers were restored a second time."""
        for name, options in self.chosen.items():
            put_options(self.options[name][0], options)

    def fetch_files(self, root: Path) -> None:
        """Put the files of the checkpoint into a folder, if there is one; see `fetch_files`."""
        if self.manifest is not None:
            fetch_files(self.storage, self.manifest, root)

    def restore_generators(self, rank: int) -> bool:
        """Put a rank's random generators back; False if the checkpoint has none for it."""
        manifest = self.manifest
        found = None if manifest is None else manifest.find(GENERATORS, rank)
        if manifest is None or found is None:
            return False
        restore_generators(self._take(manifest, found))
        return True

    def release(self) -> None:
        """Forget states that were read but not used."""
        self.states.clear()

    def _take(self, manifest: Manifest, item: ManifestObject) -> Any:
        # Each is given once, or objects would share it; and the memory is needed.
        if item.name in self.states:
            return self.states.pop(item.name)
        return read_state(self.storage, manifest, item)


def _warn_of_options(name: str, scheduler: LRScheduler, state: Mapping[str, Any]) -> None:
    """Say which of the numbers that a scheduler was made with are replaced by another run's."""
    names = signature(type(scheduler)).parameters.keys() & state.keys() - {"last_epoch"}
    made = {each: getattr(scheduler, each, None) for each in sorted(names)}
    differ = {
        each: value
        for each, value in made.items()
        if isinstance(value, int | float) and value != state[each]
    }
    if differ:
        there, here = (
            ", ".join(f"{each}={given[each]}" for each in differ) for given in (state, differ)
        )
        logger.warning(
            "the scheduler %r continues with the checkpoint's %s; %s, which it was made with here, "
            "isn't used: see docs/recipes/hyperparameters.md",
            *(name, there, here),
        )


def _read_resume_point(point: ResumePoint, into: Path | None) -> Found:
    if point.step is not None:
        manifest = point.manifest()
        return manifest, _read(point.storage, manifest, into)
    if (found := find_resumable(point.storage, point.run_id, into)) is None:
        where = point.storage.uri
        msg = f"resume_from is {point.run_id!r}, but that run has no checkpoint in {where}"
        raise CheckpointError(msg)
    return found


def _read(storage: Storage, manifest: Manifest, into: Path | None) -> dict[str, Any]:
    """Return a checkpoint's states by name; of a folder there are none, it is put `into` one."""
    if into is None:
        refuse_folder(manifest)
        return read_states(storage, manifest, manifest.objects)
    fetch_files(storage, manifest, into)
    return {}


def find_resumable(storage: Storage, run_id: str, into: Path | None = None) -> Found | None:
    """Return the newest checkpoint whose objects all verify; warn about newer ones that don't.

    None if the run has no checkpoint. With `into` it is a folder, whose files are put there. Looks
    again if some were deleted meanwhile, as a run that still trains does.

    Raises:
        InvalidParamsError: it is of the other kind.
        CheckpointError: it has some, and none verifies; a person decides whether to start over. Or
            they were deleted at every look.
        NewerFormatError: one is of a newer format: no older one is taken in its place.
        StorageError: the storage failed; falling back would throw away work that isn't lost.
    """
    tried: dict[CheckpointId, str] = {}
    for _ in range(_MAX_LOOKS):
        faults: list[str] = []
        live = live_manifests(storage, run_id, faults)
        untried = [manifest for manifest in reversed(live) if manifest.id not in tried]
        if not untried:
            break
        for manifest in untried:
            try:
                return manifest, _read(storage, manifest, into)
            except CheckpointError as error:
                logger.warning("%s; another one is tried", error)
                tried[manifest.id] = str(error)
    if tried.keys() - {manifest.id for manifest in live}:
        # It deletes checkpoints after it has made newer ones.
        msg = (
            f"checkpoints of run {run_id} in {storage.uri} were deleted while they were read: it "
            "probably still trains. Wait for its end, or let it keep more of them (keep_last)"
        )
        raise CheckpointError(msg)
    if faults := [*faults, *tried.values()]:
        msg = (
            f"run {run_id} has checkpoints in {storage.uri}, and none of them can be restored: "
            f"{'; '.join(faults)}. Repair them, or delete {checkpoints_prefix(run_id)} there to "
            "start over"
        )
        raise CheckpointError(msg)
    return None


def find_own(manifest: Manifest, name: str, item: OwnState) -> ManifestObject | None:
    """Return a rank's shard of an object; None: the checkpoint has none, or it starts over.

    Raises:
        CheckpointError: the states are those of another number of ranks.
    """
    num = manifest.num_owners(name)
    if num in (0, item.world_size):
        return manifest.find(name, item.rank)
    if item.begins_anew:
        return None
    msg = (
        f"{name!r} was tracked by ctx.track_each on {num} ranks, and here are "
        f"{item.world_size}: the states fit no rank. Resume on {num} ranks, or "
        "start the states over with ctx.track_each(on_other_world_size='begin', ...)"
    )
    raise CheckpointError(msg)
