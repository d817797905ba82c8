"""The RankContext, the object that user code gets; importing it loads no torch.

It is long by its docstrings, which are the manual.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, Unpack, cast

from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.lazy import exported_by
from prefect_torch_ddp.rank.assembly import ContextAssembly
from prefect_torch_ddp.rank.local import LocalOptions, local_assembly
from prefect_torch_ddp.records.saved_files import write_result
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


@exported_by("prefect_torch_ddp")
class RankContext:
    """The context of a rank: its place in the gang, and what a training needs beyond PyTorch.

    Every method is optional. Every rank must pass the same models and objects under the same names,
    call `loader` and `steps` with the same arguments, and request checkpoints in the same steps.
    `report`, `save` and `request_stop` may be called on any rank.

    Attributes:
        rank: number of this rank in its gang, from 0.
        world_size: number of ranks in the gang, equal on all of them.
        local_rank: number of this rank among the gang's ranks on its node, from 0. A node is a
            host, or a Dask worker if workers of the host were given separate GPUs.
        local_world_size: number of the gang's ranks on this node.
        node_rank: number of this node among the gang's nodes, from 0.
        run_id: id of the run, equal on all ranks. The run's folder in the storage is
            `runs/<run id>`.
        attempt: number of this attempt of the run, from 1, equal on all ranks.
        stage: what the code runs for, equal on all ranks: "prepare", "train" or "evaluate" in a
            workload, "task" in a `ddp_task`.
        options: the run's options by name, equal on all ranks. In a workload, `prepare` has only
            the `data_options`; `train` and `evaluate` have these in addition.
        seed: the run's seed, equal on all ranks. In `prepare` it is 0, since runs with different
            seeds share the dataset.

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

    def __init__(self, assembly: ContextAssembly) -> None:
        """A rank's function receives a context; elsewhere call `RankContext.local()`."""
        self.config = config = assembly.config
        info = assembly.info
        # The manual shows these types.
        self.rank: int = info.rank
        self.world_size: int = info.world_size
        self.local_rank: int = info.local_rank
        self.local_world_size: int = info.local_world_size
        self.node_rank: int = info.node_rank
        self.run_id: str = config.run_id
        self.attempt: int = config.attempt
        self.stage = config.stage
        self.options: Mapping[str, Any] = config.options
        self.seed: int = config.seed
        self._assembly = assembly
        self._progress, self._requests = assembly.progress, assembly.requests

    @classmethod
    def local(
        cls,
        data: str | Path | None = None,
        options: Mapping[str, Any] | None = None,
        seed: int = 0,
        storage: Storage | str | Path | None = None,
        **chosen: Unpack[LocalOptions],
    ) -> Self:
        """Make a context of world size 1 in this process. Use it in a `with` statement.

        Random generators are seeded as on a rank.

        Args:
            data: the value of `ctx.data`.
            options: the value of `ctx.options`.
            seed: seeds all random generators.
            storage: a storage, a path or a URI. None: a temporary storage, removed at the end.
            **chosen: run_id, stage, checkpoint, resume_from, ...: see `LocalOptions`.

        Raises:
            InvalidParamsError: an option has an invalid value; the message names it.
            TypeError: there is no such option.
        """
        return cls(local_assembly(data, options, seed, storage, chosen))

    @property
    def step(self) -> int:
        """Number of optimizer steps so far, including the current one."""
        return self._progress.step

    @property
    def epoch(self) -> int:
        """The current epoch, from 1; 0 before the first step."""
        return self._progress.epoch

    @property
    def epoch_ended(self) -> bool:
        """Whether the current step is the last one of its epoch."""
        return self._progress.epoch_ended

    @property
    def should_stop(self) -> bool:
        """Whether all ranks have agreed to stop; `steps` has then ended by itself.

        With a `world_size` of 1 it is true from `request_stop` on, also within `steps`.
        """
        # Not what the caller asks of only one rank, before `steps` has met it: code that left its
        # loop then would end as one that is done, while the gang was to continue with more ranks.
        return self._progress.has_stopped or (self.world_size == 1 and self._requests.wants_stop)

    @property
    def device(self) -> "torch.device":
        """The device on which this rank computes."""
        return self._assembly.device

    @property
    def data(self) -> Path:
        """The dataset's folder on this machine; in the prepare stage, the folder to write it to.

        If the dataset is in a bucket, it is downloaded when a rank on this machine first reads this
        property. The copy stays in the user's cache (`XDG_CACHE_HOME`, else `~/.cache`).

        Raises:
            InvalidParamsError: this rank was given no dataset.
            StorageError: the dataset was never published, or can't be read.
        """
        from prefect_torch_ddp.data.datasets.dataset_store import local_dataset  # noqa: PLC0415

        if self._assembly.folder is None:
            if self.config.dataset_id is None:
                given = f"the {self.stage} stage of run {self.run_id} was given no dataset"
                msg = f"{given}; RankContext.local(data=...) sets one"
                if self.config.source is not None:
                    msg += ". A workload without prepare reads its source, ctx.data_storage"
                raise InvalidParamsError(msg)
            self._assembly.folder = local_dataset(self.config.storage, self.config.dataset_id)
        return self._assembly.folder

    @property
    def data_storage(self) -> Storage:
        """The dataset in its storage, to read by ranges; in the prepare stage, the folder.

        If the workload has no prepare, this is `ctx.source`: its Parquet files are the dataset.

        Raises:
            InvalidParamsError: this rank was given no dataset.
            StorageError: the dataset was never published.
        """
        from prefect_torch_ddp.data.datasets.dataset_store import published_dataset  # noqa: PLC0415

        if self.stage == "prepare" or self.config.dataset_id is None:
            source, has_folder = self.config.source, self._assembly.folder is not None
            if self.stage == "prepare" or has_folder or source is None:
                return storage_at(self.data)
            return cast("Storage", source)  # of a run it is one
        return published_dataset(self.config.storage, self.config.dataset_id)

    @property
    def source(self) -> Readable:
        """The raw data's storage, with its credentials, e.g. for `image_folder(ctx.source)`.

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

        Train with the returned module: the gradients of a forward pass of the model itself, or of
        `.module`, aren't summed over the ranks. If you change which parameters are trained, call
        `wrap` again.

        Within `steps` each rank's gradient is weighted by its share of the global batch. The result
        is the gradient of the mean loss over the global batch, also if the shares are unequal. If a
        step makes several forward passes, each with its own backward pass, their gradients add up;
        see `micro_batches`.

        As under plain DDP, a second backward pass through the same forward pass isn't summed over
        the ranks, and a warning says so. Call `backward` once, on the sum of all losses and
        penalties. An optimizer's step raises InvalidParamsError if it uses a gradient that the
        ranks have never summed. Gradients of passes within `no_sync` aren't checked.

        Copies (`copy.deepcopy`, `AveragedModel`) are weighted in the same way. Copying and forward
        passes involve no communication, so a single rank may do them. Plain DDP sends rank 0's
        buffers to all ranks before a forward pass; here this happens after each backward pass.

        Args:
            model: equal on all ranks. Its loss must be the mean over the local samples.
            **ddp_kwargs: arguments of DistributedDataParallel.

        Returns:
            A DistributedDataParallel. On one rank, with `determinism="elastic"`, or if no parameter
            is trained: the model itself, which has no `.module`; `ddp_kwargs` then have no effect.

        Raises:
            InvalidParamsError: `process_group` has only some of the ranks, or the default process
                group isn't initialized.
        """
        return self._assembly.gradients.wrap(model, self.device, ddp_kwargs)

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

        Each epoch has every sample once, in the same order for any world size. Pass the whole
        dataset and the same arguments on every rank: the loader divides the samples among the
        ranks.

        Each time you iterate over the loader yourself (`for batch in loader:`), the epoch
        advances. After the first call of `steps` it no longer does, so that evaluations between
        epochs see the same order. When you iterate yourself, ranks may get different numbers of
        batches.

        Args:
            dataset: a map-style dataset, a `data.table`, a `data.array`, or an object with
                shards(), num_samples(shard) and iter_shard(shard).
            global_batch_size: number of samples per step over all ranks together. A rank's batch
                has its share of them, with shape [samples, ...]. Shares are equal if the number of
                ranks divides the number of samples, otherwise they differ by one (with
                `determinism="elastic"`, by more). An epoch may end with a smaller global batch, its
                uneven tail.
            shuffle: use a new order in each epoch, derived from the run's seed.
            drop_last: leave out the uneven tail of an epoch.
            seed_samples: seed python, numpy and torch for each sample in worker processes, which
                gives the same augmentation on any number of ranks and workers. "torch" seeds only
                torch, which is enough for torchvision's v2 transforms. False seeds none.
            weights: numbers of shape [samples]: how often each sample is drawn, relative to the
                others, as in torch's WeightedRandomSampler. An epoch then has as many draws as
                there are samples. The draws are the same for any world size, and each draw is
                augmented separately.
            order: a function that is called with an epoch's number, from 0, and returns the indices
                of its samples in the order to use: integers of shape [samples of an epoch], equally
                many in each epoch. `shuffle` then has no effect. A sample may appear several times,
                or not at all. The order may depend only on the epoch; it is compared between the
                ranks in each epoch.
            none_samples: "refuse": on several ranks, and with `determinism="elastic"`, a sample
                that is None raises an error with its index, since the other samples would get too
                much weight. "keep": allow None; your collate_fn must replace it by another sample.
            **dataloader_kwargs: arguments of torch's DataLoader, such as num_workers, collate_fn
                or pin_memory.

        Raises:
            InvalidParamsError: the dataset has no length or no samples, or an argument isn't
                supported here, such as a sampler; the message names it.
        """
        from prefect_torch_ddp.data.fetching import categories_of  # noqa: PLC0415 - loads torch
        from prefect_torch_ddp.data.loader import RankLoader  # noqa: PLC0415

        for name, values in categories_of(dataset).items():
            self._assembly.categories.setdefault(name, values)
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
            keeps_epoch=lambda: "loop" in vars(self._assembly),
            step_under_way=lambda: None if self._progress.share is None else self._progress.step,
            **dataloader_kwargs,
        )

    def track(self, **objects: Any) -> None:
        """Put objects into every checkpoint, and restore them in place on resume.

        Call it before `steps`, on every rank with the same names. Call `wrap` before it: an
        optimizer's restored state is put on the device of its parameters, which `wrap` moves to
        the rank's device. Random generators, position and step counters are included automatically.

        Args:
            **objects: anything with `state_dict` and `load_state_dict`: model, scheduler, ...
                Trained weights must be equal on all ranks; each checkpoint checks this. Of all
                other state, rank 0's is saved.

        Raises:
            CheckpointError: an object isn't in the checkpoint, or doesn't match its saved state.
        """
        self._assembly.training_state.track(objects)

    def track_each(
        self, *, on_other_world_size: Literal["refuse", "begin"] = "refuse", **objects: Any
    ) -> None:
        """Track objects whose state is each rank's own, such as a stateful loader.

        Each rank's state is saved, and restored on the same rank. With `track`, every rank gets
        the same state instead.

        Args:
            on_other_world_size: what to do if the run resumes on another number of ranks.
                "refuse" raises. "begin" leaves the objects as they are, with a warning. A training
                whose gang may grow or shrink needs "begin".
            **objects: as for `track`, with the same names on every rank.

        Raises:
            CheckpointError: the checkpoint has no such object, was written by another number of
                ranks, or doesn't match the object.
        """
        self._assembly.training_state.track_each(
            objects, begins_anew=on_other_world_size == "begin"
        )

    def state(self, name: str = "state", /, **values: Any) -> "Values":
        """Put plain values into every checkpoint, and restore them on resume.

            state = ctx.state(best=0.0, it=0)
            ...
            state.best = max(state.best, accuracy)

        Call it before `steps`, on every rank with the same names. As with `track`, rank 0's
        values are saved: change them on all ranks in the same way.

        Args:
            name: the name of these values in a checkpoint. Give a second call another name.
            **values: the initial values: numbers, strings, None, tensors, and lists and dicts of
                these.

        Returns:
            An object that has the values as attributes. Other attributes can't be set.

        Raises:
            InvalidParamsError: a value couldn't be read back from a checkpoint; the message names
                it.
            CheckpointError: the checkpoint has values with other names, or none.
        """
        from prefect_torch_ddp.rank.training.values import Values  # noqa: PLC0415 - if used

        made = Values(values)
        self._assembly.training_state.track({name: made})
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

        A batch is the output of the loader's collate_fn for this rank's share of the global batch.
        It isn't moved: move it to `ctx.device` yourself. Every rank gets the same number of
        batches. If a rank's share of an uneven tail is empty, its batch is a stand-in, the global
        batch's first sample, and its gradient has weight 0: run the step as usual.

        A resumed run continues within the epoch, at the step of its checkpoint. A checkpoint that
        is due is written at the end of the loop's body.

        Each `for` loop over `steps` is one call; `break` ends it. A second call continues the
        numbers of steps and epochs. On resume, finished calls yield nothing and the code after
        them runs again. Tracked objects are then restored a second time, which undoes what that
        code did to them. Every rank has to make the same calls.

        Without a loader, `for step in ctx.steps(total=5000):` yields the number of each step, which
        is `ctx.step`. The body gets its data itself, for example by drawing a batch or by playing
        a game. Gradients are then averaged over the ranks. A resumed run continues after the step
        of its checkpoint with the random generators of that time, so it draws the same numbers as
        an uninterrupted run, provided you draw a step's batch in that step. Such a call has no
        epochs.

        With any other loader, `ctx.steps(theirs, total=5000)`, each rank has its own loader and
        batches. `steps` iterates over it repeatedly and calls `set_epoch` of its samplers if they
        have it. If the loader has `state_dict` and `load_state_dict`, a resumed run restores its
        position. Otherwise the loader starts from its beginning, with a warning.

        Args:
            loader: a loader from `ctx.loader`, with the same dataset and arguments on every rank;
                or, with `total`, any iterable. None: no loader.
            epochs: number of passes over all samples, equal on all ranks. `math.inf`: until you
                leave the loop.
            total: instead of `epochs`, the number of steps that this call makes over all its
                resumes. With a loader, it runs through as many epochs as that takes.
            on_other_world_size: what to do if the state of a loader that isn't from `ctx.loader`
                was saved by another number of ranks. "refuse" raises. "begin" starts the loader
                from its beginning, with a warning.

        Raises:
            InvalidParamsError: the ranks have different datasets or arguments, calls are nested, or
                a resumed run ends before it reaches the call of `steps` in which its checkpoint was
                made. Also if the run has `determinism="elastic"` or `ledger=True`, which need
                samples, and the loader isn't from `ctx.loader`.
            CheckpointError: a checkpoint can't be written and `checkpoint.on_failure` is "fail"; or
                a loader's state was saved by another number of ranks and `on_other_world_size` is
                "refuse".
        """
        begins_anew = on_other_world_size == "begin"
        return self._assembly.loop.run(loader, epochs, total, begins_anew=begins_anew)

    def micro_batches(
        self, batch: Any, *, max_samples: int | None = None
    ) -> Iterator[tuple[Any, float]]:
        """Yield (micro-batch, weight), for gradient accumulation that is exact for any shares.

        Multiply the mean loss of each micro-batch by its weight. The gradients then add up to that
        of the mean loss over the global batch. The ranks sum them only in the last backward pass.
        With a GradScaler, scale each weighted loss; after the loop unscale, then clip, then step.

        To report the rank's mean loss, compute `sum(loss * weight) / sum(weight)`: with
        `determinism="elastic"` the weights are fractions of the global batch and don't add up to 1.
        In that mode read `.grad` only after the loop: the step's gradients are set when it ends.

        Args:
            batch: from `steps`: a tensor of shape [samples, ...], or tuples, lists and mappings of
                such tensors. Mappings are split into dicts. Lists with a plain value for each
                sample are split too. A number or a string applies to the whole batch.
            max_samples: the largest number of samples in a micro-batch. None: all of this rank's.

        Raises:
            InvalidParamsError: the batch can't be split; the message names the part.

        Example:
            At most 32 samples at a time:

                optimizer.zero_grad()
                for (images, labels), weight in ctx.micro_batches(batch, max_samples=32):
                    loss = cross_entropy(model(images.to(ctx.device)), labels.to(ctx.device))
                    (loss * weight).backward()
                optimizer.step()
        """
        return self._assembly.gradients.micro_batches(batch, max_samples)

    def report(self, **metrics: Any) -> None:
        """Record metrics of this step; never waits for a rank, a device or the storage.

        All calls within a step make one record. Outside of `steps` each call makes a record. In a
        loop of your own, call `progress` before, since all records of a step count as one value.
        Ranks may report different metrics: each is shown as the mean over the ranks that report
        it, weighted by their samples; in a validation metric (`val_loss`) all ranks have equal
        weights.

        Args:
            **metrics: numbers or 0-d tensors, such as `loss.mean()`; not yet averaged over ranks.

        Raises:
            InvalidParamsError: a metric isn't a single real number, or its name has control
                characters; the message names it.
        """
        self._assembly.reporter.report(metrics)
        self._assembly.link.heartbeat.progress()

    def progress(self, step: int, total: int | None = None, *, epoch: int = 0) -> None:
        """Report the current step of a loop that doesn't use `steps`, such as a trainer's.

        The report then shows the step and the time left. Errors, and metrics from `report`, carry
        the step's number. A gang that makes no progress for `progress_timeout_s` counts as hung. A
        call takes microseconds and doesn't wait: call it in each step, on every rank. After a
        resume, pass the number of the step at which the loop continues: what earlier attempts
        recorded of that step and of later ones no longer counts.

        Args:
            step: the current step, from 1, counted over all resumes.
            total: the number of steps. None: unknown.
            epoch: the current epoch, from 1. 0: there are no epochs.

        Raises:
            InvalidParamsError: an argument isn't a whole number, or `steps` counts the steps.
        """
        numbers = self._assembly.replay.numbers
        if numbers.has_begun:
            msg = (
                "ctx.progress is for a loop of your own, and this training has begun ctx.steps, "
                "which counts its steps itself: leave it out"
            )
            raise InvalidParamsError(msg)
        from prefect_torch_ddp.data.sampler import whole_number  # noqa: PLC0415 - loads torch

        num_steps = None if total is None else whole_number("total", total, 0)
        own = whole_number("step", step, 0), num_steps, whole_number("epoch", epoch, 0)
        numbers.note_own_progress(*own)
        self._assembly.link.heartbeat.own_step(own[0], own[2])
        self._assembly.reporter.show_progress()

    def checkpoint(self, *, force: bool = False) -> None:
        """Request a checkpoint: within `steps` at this step's end, outside at once.

        Call it on every rank. Within `steps` only `force=True` has an effect, since checkpoints
        that are due are written without a request. A step has at most one. Outside of `steps` use
        `force=True` too: without it, a call only writes the checkpoint by `every_steps` or
        `every_epochs` of a step that you left by `break`, and in your own loop, without `steps`,
        it writes none and logs a warning. There `due` returns when one is due:

            ctx.checkpoint(force=ctx.due(step).save)

        Each checkpoint outside of `steps` takes the next free number; in your own loop these are
        0, 1, 2, ... On resume, tracked objects and random generators are restored from the newest
        checkpoint. With `checkpoint_folder`, `force=True` makes the next call of `due` ask for a
        save.

        Args:
            force: write a checkpoint even if none is due.

        Raises:
            CheckpointError: outside of `steps`, an earlier checkpoint can't be written and
                `checkpoint.on_failure` is "fail".
        """
        if self._progress.share is not None or self._assembly.saves_folders:
            if force:
                self._requests.ask_for_save()
        elif force:
            self._assembly.training_state.save_outside()
        else:
            self._assembly.training_state.save_if_left(asks_due=self._assembly.asks_due)

    @property
    def checkpoint_folder(self) -> Path:
        """A local folder of this rank, for a program that writes its own checkpoints.

        At the start it contains the newest committed folder with the files of all ranks, whichever
        attempt, host or number of ranks wrote them. It is removed at the end. Read this property on
        every rank. Don't use `track` or `steps` with it: they make checkpoints themselves.

        Raises:
            InvalidParamsError: `track` or `steps` was called, or made the run's checkpoints. Or
                this is the prepare stage, which has none.
            CheckpointError: there are commits, but all of them are damaged.
        """
        return self._assembly.program.folder.root

    @property
    def committed(self) -> Path | None:
        """The folder in `checkpoint_folder` that this attempt resumes from. None: there was none.

        Later commits don't change it.
        """
        return self._assembly.program.folder.committed

    def commit(
        self, folder: str | Path, *, step: int, files: Iterable[str | Path] | None = None
    ) -> None:
        """Put a folder's files into the run's storage as the checkpoint of a step.

        The checkpoint is written in the background. It is valid once the files of all ranks are
        stored; until then the previous checkpoint is. Call it on every rank, with a folder of the
        same name. The name of a folder in `checkpoint_folder` is its path there; that of any other
        folder is its last component. You may delete the folder at once, but don't change its files:
        make a new folder for each step. Files are copied as they are, never unpickled.

        Args:
            folder: the folder with this rank's files, at any depth.
            step: the checkpoint's number: the number of finished steps over all attempts. It must
                be larger than that of the previous commit and equal on all ranks.
            files: the files that this rank commits, as paths in the folder. Needed if the ranks
                share the folder: each rank then names its files. None: all files.

        Raises:
            InvalidParamsError: there are no such files, the step isn't larger than the previous
                one, a file of the previous commit was changed, or ranks have different files of
                the same name.
            BadKeyError: a file's name isn't valid for an object in a storage.
            CheckpointError: the previous commit can't be written and `checkpoint.on_failure` is
                "fail".
        """
        self._assembly.program.folder.commit(Path(folder), step, files)

    def due(self, step: int, *, ends_epoch: int | None = None) -> "Due":
        """Return what all ranks must do at the end of a step of your own loop: save, stop, or both.

            due = ctx.due(step)
            if due.save:
                write(ctx.checkpoint_folder / f"step-{step}")
                ctx.commit(ctx.checkpoint_folder / f"step-{step}", step=step)
            if due.stop:
                break

        A checkpoint is due at the intervals of `CheckpointParams`, at a stop, and after
        `checkpoint(force=True)`. A stop is due at the next step after a cancel, SIGTERM or
        `request_stop`, and shortly before a batch job reaches its time limit. A call uses no
        collective and takes microseconds.

        Args:
            step: the step that ended, from 1, counted over all attempts. Call `due` once in each
                step, on all ranks.
            ends_epoch: if the step is the last one of an epoch, the epoch's number, from 1.

        Returns:
            `save` and `stop`, equal on all ranks. `save` is False if `checkpoint_folder` wasn't
            read and nothing is tracked.

        Raises:
            InvalidParamsError: the step isn't the one after that of the previous call, or it or
                the epoch is no whole number from 1.
            RuntimeError: there are several ranks and the process group isn't initialized.
        """
        return self._assembly.program.due(step, ends_epoch)

    def request_stop(self, reason: str) -> None:
        """Have all ranks end `steps` after the same step: this one or the next.

        A request by one rank is enough. If all ranks request it in the same step, `steps` ends
        after this step. A later resume adds no steps.

        Args:
            reason: written to the log.
        """
        logger.info("requests a stop after step %d: %s", self.step, reason)
        self._requests.ask_to_stop()

    def save(self, path: str, data: bytes | str) -> None:
        """Write a file to the run's results, at once. `read_result` reads it.

        Each attempt has its own files: `runs/<run id>/results/<attempt>/<path>`. So does each step
        that `evaluate_flow` evaluates: `runs/<run id>/results/evaluate/step-00000400/<path>`.

        Args:
            path: a relative path with forward slashes. If several ranks write the same path, the
                last one wins.
            data: the whole content; a string is written as UTF-8.

        Raises:
            InvalidParamsError: the data are neither bytes nor a string.
            BadKeyError: the path leads outside of the results.
            SupersededError: a newer attempt of this run has begun.
            StorageError: it can't be written.
        """
        self.config.refuse_superseded()
        write_result(self.config.storage, self.run_id, self.config.results_folder, path, data)

    def close(self, *, failed: bool = False) -> None:
        """Write the last checkpoint and pending metrics. A second call has no effect.

        Call it on every rank, since the ranks agree on the last checkpoint.

        Args:
            failed: the code ended by an exception. Then no last checkpoint is made, and `close`
                doesn't raise.

        Raises:
            CheckpointError: the last checkpoint can't be written.
            StorageError: metrics, or the ledger, can't be written.
        """
        self._assembly.close(failed=failed)

    def __enter__(self) -> Self:
        """Use it in a `with`."""
        _entered.append(self)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Close it."""
        _entered.remove(self)
        self._assembly.close(failed=error is not None, error=error)


_entered: list[RankContext] = []


@exported_by("prefect_torch_ddp")
def current_context() -> RankContext | None:
    """Return the RankContext of this rank, or None if there is none.

    Use it in code that isn't passed a context, such as a script that runs both as a `ddp_script`
    and under torchrun.

    Example:
        Log from rank 0, with and without a gang:

            from prefect_torch_ddp import current_context

            ctx = current_context()
            if ctx is None or ctx.rank == 0:
                print("begins")
    """
    return _entered[-1] if _entered else None
