"""The RankContext, the object that user code gets; importing it loads no torch.

It is long by its docstrings, which are the manual.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, Unpack

from prefect_torch_ddp.checkpoint.attempts import refuse_superseded, write_result
from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.rank.assembly import ContextParts
from prefect_torch_ddp.rank.local import LocalOptions, local_parts
from prefect_torch_ddp.rank.training.numbers import OwnProgress
from prefect_torch_ddp.storage.locate import storage_at
from prefect_torch_ddp.storage.protocol import Readable, Storage

if TYPE_CHECKING:
    import torch
    from torch.utils.data import Dataset

    from prefect_torch_ddp.data.arguments import NoneSamples, Order, Weights
    from prefect_torch_ddp.data.fetching import SeedSamples
    from prefect_torch_ddp.data.loader import RankLoader
    from prefect_torch_ddp.data.shards import Sharded
    from prefect_torch_ddp.data.tables.dataset import Table
    from prefect_torch_ddp.rank.programs.own_loop import Due
    from prefect_torch_ddp.rank.training.values import Values

logger = logging.getLogger(__name__)


class RankContext:
    """The context of a rank: its place in the gang, and what a training needs beyond PyTorch.

    Every method is optional. Every rank must pass the same models and objects under the same names,
    give the loader and the loop the same arguments, and request checkpoints in the same steps.
    Metrics, files and a request to stop may come from any rank.

    Example:
        A training is plain PyTorch:

            model = ctx.wrap(Net())
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            ctx.track(model=model, optimizer=optimizer)
            for images, labels in ctx.steps(ctx.loader(dataset, global_batch_size=64), epochs=5):
                loss = cross_entropy(model(images.to(ctx.device)), labels.to(ctx.device))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                ctx.report(loss=loss)
    """

    def __init__(self, parts: ContextParts) -> None:
        """Ranks are given one; elsewhere call `RankContext.local()`."""
        self.config = config = parts.config
        self.rank, self.world_size = parts.info.rank, parts.info.world_size
        self.local_rank, self.node_rank = parts.info.local_rank, parts.info.node_rank
        self.local_world_size = parts.info.local_world_size
        self.run_id, self.attempt, self.stage = config.run_id, config.attempt, config.stage
        self.options: Mapping[str, Any] = config.options
        self.seed = config.seed
        self._parts = parts
        self._progress, self._requests = parts.progress, parts.requests

    @classmethod
    def local(
        cls,
        data: str | Path | None = None,
        options: Mapping[str, Any] | None = None,
        seed: int = 0,
        storage: Storage | str | Path | None = None,
        **chosen: Unpack[LocalOptions],
    ) -> Self:
        """Make one in this process, of world size 1, seeded as a rank; use it in a `with`.

        Args:
            data: the value of `ctx.data`.
            options: the value of `ctx.options`.
            seed: seeds everything random.
            storage: a storage, a path or a URI; None: a temporary one, removed at the end.
            **chosen: run_id, stage, checkpoint, resume_from, ...: see `LocalOptions`.

        Raises:
            InvalidParamsError: an option can't be so; names it.
            TypeError: there is no such option.
        """
        return cls(local_parts(data, options, seed, storage, chosen))

    @property
    def step(self) -> int:
        """Number of optimizer steps, including the one under way."""
        return self._progress.step

    @property
    def epoch(self) -> int:
        """The current epoch, from 1; 0 before the first step."""
        return self._progress.epoch

    @property
    def epoch_ended(self) -> bool:
        """Whether the step under way is the last one of its epoch."""
        return self._progress.epoch_ended

    @property
    def should_stop(self) -> bool:
        """Whether all ranks have agreed to stop; `steps` has then ended by itself."""
        # Not what the caller asks of a rank alone, before `steps` has met it: code that left its
        # loop then would end as one that is done, while the gang was to go on with more ranks.
        return self._progress.has_stopped or (self.world_size == 1 and self._requests.wants_stop)

    @property
    def device(self) -> "torch.device":
        """Where this rank computes."""
        return self._parts.device

    @property
    def data(self) -> Path:
        """The local dataset; in the prepare stage the folder to write it to.

        The first call on a machine downloads it if it doesn't lie there.

        Raises:
            InvalidParamsError: this rank was given no dataset.
            StorageError: the dataset was never published, or can't be read.
        """
        from prefect_torch_ddp.data.dataset_store import local_dataset  # noqa: PLC0415 - if used

        if self._parts.folder is None:
            if self.config.dataset_id is None:
                given = f"the {self.stage} stage of run {self.run_id} was given no dataset"
                msg = f"{given}; RankContext.local(data=...) sets one"
                raise InvalidParamsError(msg)
            self._parts.folder = local_dataset(self.config.storage, self.config.dataset_id)
        return self._parts.folder

    @property
    def data_storage(self) -> Storage:
        """The dataset where it lies, to read by ranges; in prepare the folder.

        Raises:
            InvalidParamsError: this rank was given no dataset.
            StorageError: the dataset was never published.
        """
        from prefect_torch_ddp.data.dataset_store import dataset_in_place  # noqa: PLC0415 - if used

        if self.stage == "prepare" or self.config.dataset_id is None:
            return storage_at(self.data)
        return dataset_in_place(self.config.storage, self.config.dataset_id)

    @property
    def source(self) -> Readable:
        """Where the raw data is, with its credentials, such as for `image_folder(ctx.source)`.

        Raises:
            InvalidParamsError: this run was given no source.
        """
        if self.config.source is None:
            msg = (
                f"run {self.run_id} was given no source: name the raw data's place as "
                "TrainParams(source=...), a directory, s3://bucket/prefix or a block, or as "
                "RankContext.local(source=...)"
            )
            raise InvalidParamsError(msg)
        return self.config.source

    def wrap(self, model: "torch.nn.Module", **ddp_kwargs: Any) -> "torch.nn.Module":
        """Move a model to the rank's device and have its gradients averaged over all ranks.

        Train with what it returns: a forward pass of the model itself, or of `.module`, isn't
        summed over the ranks. Wrap it again after you change which parameters are trained.

        Within `steps` each rank's gradient is weighted by its share of the global batch, so an
        uneven tail also gives exactly the gradient of its mean loss. Several pairs of a forward
        and a backward pass in a step add up; see `micro_batches`. As under plain DDP, a second
        backward pass of the same forward pass isn't summed over the ranks, which is warned of: add
        a penalty to the loss instead. An optimizer's step on gradients of which no pass was ever
        summed raises InvalidParamsError. What you do within `no_sync` is up to you.

        Copies (`copy.deepcopy`, `AveragedModel`) are weighted in the same way. Copying and
        forward passes involve no communication, so a single rank may do them: buffers are
        synchronised from rank 0 after each backward pass instead.

        Args:
            model: equal on all ranks; its loss is the mean over the local samples.
            **ddp_kwargs: for DistributedDataParallel.

        Raises:
            InvalidParamsError: `process_group` is of some of the ranks only; or the process group
                isn't up.
        """
        self._parts.saver.wrapped.add(model)
        return self._parts.gradients.wrap(model, self.device, ddp_kwargs)

    def loader(  # noqa: PLR0913 - choices of a loader, by name
        self,
        dataset: "Dataset[Any] | Sharded | Table",
        *,
        global_batch_size: int,
        shuffle: bool = True,
        drop_last: bool = False,
        seed_samples: "SeedSamples" = True,
        weights: "Weights | None" = None,
        order: "Order | None" = None,
        none_samples: "NoneSamples" = "refuse",
        **dataloader_kwargs: Any,
    ) -> "RankLoader":
        """Make a loader of this rank's share of each global batch.

        Each epoch has every sample once, in the same order for any world size. Give it the whole
        dataset and the same arguments on every rank; which of them have which samples is its own
        business.

        Each time you iterate over the loader yourself (`for batch in loader:`), the epoch
        advances. After the first call of `steps` it no longer does, so that evaluations between
        epochs see the same order. In such a pass ranks may get different numbers of batches.

        Args:
            dataset: map-style; a `data.table`; or with shards(), num_samples(shard) and
                iter_shard(shard).
            global_batch_size: samples per step over all ranks together. A rank's batch has its
                share of them, [samples, ...]: equal shares, but for an uneven tail.
            shuffle: a new order each epoch, from the run's seed.
            drop_last: leave out the uneven tail of an epoch.
            seed_samples: seed python, numpy and torch for each sample in worker processes: the
                same augmentation on any number of ranks and workers. "torch" seeds only torch,
                which is enough for torchvision's v2 transforms; False seeds none.
            weights: numbers [samples]: how often each sample is drawn, in relation to the others,
                as by torch's WeightedRandomSampler. An epoch is then as many draws as there are
                samples, the same for any world size; each is augmented by itself.
            order: a function that returns the indices of the samples of an epoch, from 0, in the
                order to take them: whole numbers [samples of an epoch], as many in each epoch.
                `shuffle` has no effect then. A sample may come several times, or not at all. It
                may depend on the epoch only, and is compared between the ranks in each epoch.
            none_samples: a sample that is None is refused by its index on several ranks, since
                the others would count for too much. "keep": collate_fn puts another in its place.
            **dataloader_kwargs: for torch's DataLoader, such as num_workers, collate_fn or
                pin_memory.

        Raises:
            InvalidParamsError: the dataset has no length or no samples, or an argument can't work
                here, such as a sampler; names it.
        """
        from prefect_torch_ddp.data.loader import RankLoader  # noqa: PLC0415 - loads torch

        return RankLoader(
            dataset,
            global_batch_size=global_batch_size,
            shuffle=shuffle,
            drop_last=drop_last,
            seed_samples=seed_samples,
            weights=weights,
            order=order,
            none_samples=none_samples,
            rank=self.rank,
            world_size=self.world_size,
            seed=self.seed,
            virtual_ranks=self.config.virtual_ranks if self.config.is_elastic else None,
            keep_ids=self.config.ledger,
            # From the first call of ctx.steps on: a resumed training has forgotten the passes.
            keeps_epoch=lambda: "loop" in vars(self._parts),
            **dataloader_kwargs,
        )

    def track(self, **objects: Any) -> None:
        """Put objects into every checkpoint, and restore them in place on resume.

        Call it before `steps`, on every rank with the same names. Random generators, position
        and step counters are included automatically.

        Args:
            **objects: anything with `state_dict` and `load_state_dict`: model, scheduler, ...
                Weights that are trained have to be equal on all ranks, which each checkpoint
                checks; of everything else rank 0's is kept.

        Raises:
            CheckpointError: an object isn't in the checkpoint, or doesn't fit.
        """
        self._parts.tracker.track(objects)

    def track_each(
        self, *, on_other_world_size: Literal["refuse", "begin"] = "refuse", **objects: Any
    ) -> None:
        """Track objects whose state is each rank's own, such as a stateful loader.

        Each rank's state is saved, and restored on the same rank. Of what `track` takes, every
        rank gets the same state instead.

        Args:
            on_other_world_size: if the run resumes on another number of ranks, "refuse" raises,
                and "begin" leaves the objects as they are, with a warning. A training whose gang
                may grow or shrink needs "begin".
            **objects: as for `track`; on every rank the same names.

        Raises:
            CheckpointError: the checkpoint has no such object, or it is of another number of
                ranks, or doesn't fit.
        """
        self._parts.tracker.track_each(objects, begins_anew=on_other_world_size == "begin")

    def state(self, name: str = "state", /, **values: Any) -> "Values":
        """Put plain values into every checkpoint, and take them back on resume.

            state = ctx.state(best=0.0, it=0)
            ...
            state.best = max(state.best, accuracy)

        Call it before `steps`, on every rank with the same names. As of what `track` takes, rank
        0's values are kept: change them on all ranks in the same way.

        Args:
            name: of these values in a checkpoint, for a second call.
            **values: what they are at first: numbers, texts, None, tensors, and lists and dicts of
                them.

        Returns:
            An object that has the values as attributes, and takes no others.

        Raises:
            InvalidParamsError: a value can't be read back from a checkpoint; names it.
            CheckpointError: the checkpoint has values of other names, or none.
        """
        from prefect_torch_ddp.rank.training.values import Values  # noqa: PLC0415 - if used

        made = Values(values)
        self._parts.tracker.track({name: made})
        return made

    def steps(
        self,
        loader: "RankLoader | Iterable[Any] | None" = None,
        *,
        epochs: float | None = None,
        total: float | None = None,
        on_other_world_size: Literal["refuse", "begin"] = "refuse",
    ) -> Iterable[Any]:
        """Yield a batch per optimizer step until all epochs are done or all ranks stop.

        A batch is what the loader's collate_fn made of this rank's share of the global batch, and
        stays where the loader put it: move it to `ctx.device` yourself. Every rank gets equally
        many. On a rank whose share of a tail is empty the batch is a stand-in, the global batch's
        first sample, whose gradient counts for nothing: run the step as for any other.

        A resumed run continues in mid-epoch, where its checkpoint was made. A checkpoint that is
        due is written when the loop's body has ended.

        Each `for` loop over it is a call, which a `break` ends; a second one numbers steps and
        epochs on. On resume, finished calls yield nothing and the code after them runs again; then
        tracked objects are restored, so that what that code did to them counts once. Every rank
        has to make the same calls.

        Without a loader, `for step in ctx.steps(total=5000):` yields the number of each step, which
        is `ctx.step`, and the body gets its own data, such as by drawing a batch or by playing a
        game. Gradients are then averaged over the ranks. A resumed run continues after the step of
        its checkpoint with the random generators of that time, so it draws what an undisturbed one
        draws: draw a step's batch in that step. Such a call has no epochs.

        A loader of others, `ctx.steps(theirs, total=5000)`, is each rank's own, as are its batches.
        It is gone over again and again, with `set_epoch` of its samplers where they have it. If it
        has `state_dict` and `load_state_dict`, a resumed run continues where these say; else it
        begins from the start, which is warned of.

        Args:
            loader: from `ctx.loader`, of the same dataset and arguments on every rank; or, with
                `total`, any iterable; None: there is none.
            epochs: how often all samples are seen, equal on all ranks; `math.inf`: until the loop
                is left.
            total: in place of `epochs`, how many steps this call makes over all its resumes; also
                with a loader, whose epochs it then goes through one after the other.
            on_other_world_size: if a loader of others was saved by another number of ranks,
                "refuse" raises, and "begin" begins it from the start, with a warning.

        Raises:
            InvalidParamsError: the loader is another one, the ranks have different datasets or
                arguments, a call is inside of another one, or the code after finished calls made
                fewer of them on resume. Or the run has `determinism="elastic"` or `ledger=True`,
                which are about samples, and the call has no loader of `ctx.loader`.
            CheckpointError: a checkpoint can't be written and `checkpoint.on_failure` is "fail"; or
                a loader of others was saved by another number of ranks.
        """
        begins_anew = on_other_world_size == "begin"
        return self._parts.loop.run(loader, epochs, total, begins_anew=begins_anew)

    def micro_batches(
        self, batch: Any, *, max_samples: int | None = None
    ) -> Iterator[tuple[Any, float]]:
        """Yield (micro-batch, weight): exact gradient accumulation, also over uneven shares.

        The gradient is that of the mean loss over the global batch; the ranks sum it only
        in the last backward pass. With a GradScaler, scale each weighted loss; after the loop
        unscale, then clip, then step. The rank's mean loss, to report, is
        `sum(loss * weight) / sum(weight)`: under elastic determinism the weights are parts of the
        global batch and don't add up to 1. There the gradients come at the loop's end.

        Args:
            batch: from `steps`: a tensor of shape [samples, ...], or tuples, lists and mappings of
                them; mappings are cut into dicts. Lists with a plain value for each sample are cut
                too; a number or a text is of the whole batch.
            max_samples: how many samples a micro-batch has at most; None: all of this rank's.

        Raises:
            InvalidParamsError: the batch can't be cut; names the part.

        Example:
            At most 32 samples at a time:

                optimizer.zero_grad()
                for (images, labels), weight in ctx.micro_batches(batch, max_samples=32):
                    (cross_entropy(model(images), labels) * weight).backward()
                optimizer.step()
        """
        return self._parts.gradients.micro_batches(batch, max_samples)

    def report(self, **metrics: Any) -> None:
        """Record metrics of this step; never waits for a rank, a device or the storage.

        The calls of one step make one record; outside of `steps` each call makes its own. Ranks may
        report different metrics: of each one people see the mean over the ranks that report it.

        Args:
            **metrics: numbers or 0-d tensors, such as `loss.mean()`; not yet averaged over ranks.

        Raises:
            InvalidParamsError: one isn't a single real number; names it.
        """
        self._parts.reporter.report(metrics)
        self._parts.link.heartbeat.progress()

    def progress(self, step: int, total: int | None = None, *, epoch: int = 0) -> None:
        """Say how far a loop of your own is, that doesn't go over `steps`, such as a trainer's.

        People then see its steps and the time left, what `report` gets is of this step, an error
        names it, and a gang that makes no progress for `progress_timeout_s` counts as hung. It
        costs microseconds and waits for nobody: call it in each step, on every rank. A resumed
        loop says the number that it continues with, which takes back the records from there on.

        Args:
            step: the one under way, from 1; over all resumes.
            total: how many there will be; None: it isn't known.
            epoch: the one under way, from 1; 0: there are none.

        Raises:
            InvalidParamsError: it isn't a whole number, or `steps` counts the steps.
        """
        numbers = self._parts.replay.numbers
        if numbers.has_begun:
            msg = (
                "ctx.progress is for a loop of your own, and this training has begun ctx.steps, "
                "which counts its steps itself: leave it out"
            )
            raise InvalidParamsError(msg)
        from prefect_torch_ddp.data.sampler import whole_number  # noqa: PLC0415 - loads torch

        num_steps = None if total is None else whole_number("total", total, 0)
        own = whole_number("step", step, 0), num_steps, whole_number("epoch", epoch, 0)
        numbers.note_own_progress(OwnProgress(*own))
        self._parts.link.heartbeat.own_step(own[0], own[2])
        self._parts.reporter.show_progress()

    def checkpoint(self, *, force: bool = False) -> None:
        """Request a checkpoint, on every rank: at this step's end; outside of `steps` at once.

        Within `steps`, due ones are written without a request, and a step has one. Outside, each
        forced one has the next number: in your own loop 0, 1, 2, ... A resumed run finds tracked
        objects and random generators there as they were at the newest one.

        Args:
            force: also when none is due.

        Raises:
            CheckpointError: outside of `steps`, one that was begun before can't be written and
                `checkpoint.on_failure` is "fail".
        """
        if self._progress.share is not None or self._parts.saves_folders:
            if force:
                self._requests.ask_for_save()
        elif force:
            self._parts.tracker.save_outside()
        else:
            self._parts.tracker.save_if(self._parts.tracker.due())

    @property
    def checkpoint_folder(self) -> Path:
        """A local folder of this rank, for a program that writes its own checkpoints.

        At first it holds the newest folder that `commit` was given, by whatever attempt, host or
        number of ranks: the files of all ranks. It is removed at the end. Ask for it on every rank,
        and use neither `track` nor `steps`, which make checkpoints themselves.

        Raises:
            InvalidParamsError: `track` or `steps` was called, or made the run's checkpoints.
            CheckpointError: there are commits, and none is whole.
        """
        return self._parts.program.folder.root

    @property
    def committed(self) -> Path | None:
        """The folder in `checkpoint_folder` that the newest commit left; None: there is none."""
        return self._parts.program.folder.committed

    def commit(
        self, folder: str | Path, *, step: int, files: Iterable[str | Path] | None = None
    ) -> None:
        """Put a folder's files into the run's storage as the checkpoint of a step.

        It is written in the background, and counts when the files of all ranks are there. Until
        then the one before it counts. Call it on every rank, with a folder of the same name: its
        place in `checkpoint_folder`, or its own name. You may delete the folder at once, but not
        change its files: make a new one for each step. Files are read as they are, never unpickled.

        Args:
            folder: with this rank's files, at any depth.
            step: the checkpoint's number, larger than the one before it: the steps that are done,
                over all attempts. Equal on all ranks.
            files: which of its files this rank commits, by their paths in it. Needed if the ranks
                share the folder, so that each names its own. None: all of them.

        Raises:
            InvalidParamsError: there are no such files, the step isn't a later one, or a file of
                the commit before was changed, or is another one on another rank.
            BadKeyError: a file's name can't be that of an object in a storage.
            CheckpointError: the one before can't be written and `checkpoint.on_failure` is "fail".
        """
        self._parts.program.folder.commit(Path(folder), step, files)

    def due(self, step: int, *, ends_epoch: int | None = None) -> "Due":
        """Say what all ranks are to do at the end of a step of your own loop: save, stop, or both.

            due = ctx.due(step)
            if due.save:
                write(ctx.checkpoint_folder / f"step-{step}")
                ctx.commit(ctx.checkpoint_folder / f"step-{step}", step=step)
            if due.stop:
                break

        A checkpoint is due as `CheckpointParams` say, at a stop, and when `checkpoint(force=True)`
        asked for one. A stop is due at the next step after a cancel, the walltime, SIGTERM or
        `request_stop`. It uses no collective, and takes microseconds.

        Args:
            step: the one that ended, from 1, over all attempts; call it once in each, on all ranks.
            ends_epoch: if the step is the last one of an epoch, that one's number, from 1.

        Returns:
            `save` and `stop`, equal on all ranks. Without `checkpoint_folder` nothing is saved.

        Raises:
            InvalidParamsError: the step isn't a later one than before.
            RuntimeError: there are several ranks and the process group isn't up.
        """
        return self._parts.program.due(step, ends_epoch)

    def request_stop(self, reason: str) -> None:
        """Have all ranks end `steps` after the same step, this or the next; a resume adds none.

        One rank's request is enough. It is this step if all ranks ask in it.

        Args:
            reason: for the log.
        """
        logger.info("asks to stop after step %d: %s", self.step, reason)
        self._requests.ask_to_stop()

    def save(self, path: str, data: bytes | str) -> None:
        """Write a file to the run's results, at once; `read_result` finds it.

        Each attempt has files of its own: `runs/<run id>/results/<attempt>/<path>`.

        Args:
            path: relative, with forward slashes. Of ranks that write the same one, the last wins.
            data: the whole content; text is written as UTF-8.

        Raises:
            InvalidParamsError: the data are neither bytes nor text.
            BadKeyError: the path leads outside of the results.
            SupersededError: a newer attempt of this run has begun.
            StorageError: it can't be written.
        """
        run = (self.config.storage, self.run_id, self.attempt)
        if self.config.trains:  # the others claim no attempt, so that none can supersede them
            refuse_superseded(*run)
        write_result(*run, path, data)

    def close(self, *, failed: bool = False) -> None:
        """Write what is pending: the last checkpoint, the metrics. Doing it twice is no error.

        Every rank has to come here, since they agree on the last checkpoint.

        Args:
            failed: by an exception: no last checkpoint is made, and nothing here raises.

        Raises:
            CheckpointError: the last checkpoint can't be written.
            StorageError: metrics, or the ledger, can't be written.
        """
        self._parts.close(failed=failed)

    def __enter__(self) -> Self:
        """Use it in a `with`."""
        _entered.append(self)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Close it."""
        _entered.remove(self)
        self._parts.close(failed=error is not None, error=error)


_entered: list[RankContext] = []


def current_context() -> RankContext | None:
    """Return the RankContext of the code that asks, or None if there is none.

    For code that isn't given one, such as a script that runs as a `ddp_script` and under torchrun.
    """
    return _entered[-1] if _entered else None
