"""Owns the RankContext, the object that user code gets; importing it loads no torch."""

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.params import CheckpointParams, Determinism
from prefect_torch_ddp.protocol.heartbeat import Phase
from prefect_torch_ddp.rank.config import RankConfig, Stage
from prefect_torch_ddp.rank.link import Link
from prefect_torch_ddp.rank.loop.state import Place
from prefect_torch_ddp.rank.parts import ContextParts
from prefect_torch_ddp.storage.protocol import Readable, Storage

if TYPE_CHECKING:
    import torch
    from torch.utils.data import Dataset

    from prefect_torch_ddp.data.fetching import SeedSamples
    from prefect_torch_ddp.data.loader import RankLoader
    from prefect_torch_ddp.data.shards import Sharded


logger = logging.getLogger(__name__)


class RankContext:
    """What this rank is, and what every training needs and plain PyTorch lacks; every call is
    optional.

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

    def __init__(
        self,
        config: RankConfig,
        place: Place,
        *,
        device: "torch.device | None" = None,
        link: Link | None = None,
        data: Path | None = None,
    ) -> None:
        """Make it for one stage on one rank; user code gets it as its first argument, or from
        `RankContext.local()`.

        Args:
            config: equal on all ranks.
            place: which rank this is.
            device: where this rank computes; None: the first CUDA device, else the CPU.
            link: the way to the supervisor.
            data: the local dataset, or in the prepare stage the folder to write to; None: found
                in the storage.
        """
        self.config = config
        self.rank = place.rank
        self.world_size = place.world_size
        self.local_rank = place.local_rank
        self.local_world_size = place.local_world_size
        self.node_rank = place.node_rank
        self.run_id = config.run_id
        self.attempt = config.attempt
        self.stage = config.stage
        self.options: Mapping[str, Any] = config.options
        self.seed = config.seed
        self._device = device
        self._data = data
        link = link or Link()
        link.heartbeat.enter(Phase.SETUP)
        self._parts = ContextParts(config, place, link)
        self._state = self._parts.state

    @classmethod
    def local(  # noqa: PLR0913 - a debugger's or test's choices, all by name
        cls,
        data: str | Path | None = None,
        options: Mapping[str, Any] | None = None,
        seed: int = 0,
        storage: Storage | str | Path | None = None,
        *,
        run_id: str = "local",
        stage: Stage = "train",
        checkpoint: CheckpointParams | None = None,
        resume_from: str | None = None,
        restore_step: int | None = None,
        determinism: Determinism = "default",
        virtual_ranks: int | None = None,
        ledger: bool = False,
        source: Readable | str | Path | None = None,
    ) -> Self:
        """Make one in this process: world size 1, no process group. Seeds python, numpy and
        torch, as a rank does.

        Use it in a `with`, or call `close()`.

        Args:
            data: what `ctx.data` is to be.
            options: what `ctx.options` is to be.
            seed: seeds everything random.
            storage: a Storage or a directory; None: a temporary one, removed at the end.
            run_id: names the run's folder; the same one again resumes it.
            stage: "evaluate" restores the checkpoint of `restore_step`.
            checkpoint: when checkpoints are written, and which are kept.
            resume_from: run to take the first checkpoint from: its id, or `<path or s3:// URI
                of its storage>/runs/<id>`, either perhaps with `/checkpoints/step-00000400`.
            restore_step: see stage.
            determinism: "elastic" gives the bits that any number of ranks dividing
                `virtual_ranks` gives.
            virtual_ranks: see determinism.
            ledger: put on record which samples each step trains on; `read_ledger` checks it.
            source: what `ctx.source` is to be: a storage, a path or an s3:// URI.
        """
        from prefect_torch_ddp.rank.parts import local_config  # noqa: PLC0415 - loads torch

        config, temporary = local_config(
            storage,
            run_id=run_id,
            stage=stage,
            options=dict(options or {}),
            seed=seed,
            checkpoint=checkpoint or CheckpointParams(),
            resume_from=resume_from,
            restore_step=restore_step,
            determinism=determinism,
            virtual_ranks=virtual_ranks,
            ledger=ledger,
            source=source,
        )
        context = cls(config, Place(), data=None if data is None else Path(data))
        context._parts.temporary = temporary
        return context

    @property
    def step(self) -> int:
        """Optimizer steps, the one under way included."""
        return self._state.step

    @property
    def epoch(self) -> int:
        """The current epoch, from 1; 0 before the first step."""
        return self._state.epoch

    @property
    def epoch_ended(self) -> bool:
        """Whether the step under way is the last one of its epoch."""
        return self._state.epoch_ended

    @property
    def should_stop(self) -> bool:
        """Whether all ranks have agreed to stop; `steps` has then ended by itself."""
        alone = self.world_size == 1 and (
            self._state.stop_wanted or self._parts.link.stop_requested()
        )
        return self._state.stop_agreed or alone

    @property
    def device(self) -> "torch.device":
        """Where this rank computes."""
        if self._device is None:
            import torch  # noqa: PLC0415 - user code has loaded it by now

            self._device = (
                torch.device("cuda", torch.cuda.current_device())
                if torch.cuda.is_available()
                else torch.device("cpu")
            )
        return self._device

    @property
    def data(self) -> Path:
        """The local dataset; in the prepare stage the folder to write it to.

        Raises:
            InvalidParamsError: this rank was given no dataset.
        """
        if self._data is None:
            if self.config.dataset_id is None:
                msg = f"the {self.stage} stage of run {self.run_id} was given no dataset; RankContext.local(data=...) sets one"
                raise InvalidParamsError(msg)
            from prefect_torch_ddp.data.dataset_store import local_dataset  # noqa: PLC0415 - only who asks for data pays

            self._data = local_dataset(self.config.storage, self.config.dataset_id)
        return self._data

    @property
    def data_storage(self) -> Storage:
        """The dataset as a storage, where it lies: nothing is copied, so that shards are read
        by ranges. In prepare, the folder.

        Raises:
            InvalidParamsError: this rank was given no dataset.
            StorageError: it was never published.
        """
        from prefect_torch_ddp.data.dataset_store import dataset_in_place  # noqa: PLC0415 - only who asks for data pays
        from prefect_torch_ddp.storage.directory import DirectoryStorage  # noqa: PLC0415

        if self._data is None and self.config.dataset_id is not None:
            return dataset_in_place(self.config.storage, self.config.dataset_id)
        return DirectoryStorage(self.data)

    @property
    def source(self) -> Readable:
        """Where the raw data is, with its credentials: `TrainParams.source`;
        `image_folder(ctx.source, ...)` reads images there.

        Raises:
            InvalidParamsError: this run was given none.
        """
        if self.config.source is None:
            msg = (
                f"run {self.run_id} was given no source: name the raw data's place as TrainParams(source=...), a directory, "
                "s3://bucket/prefix or a block, or as RankContext.local(source=...)"
            )
            raise InvalidParamsError(msg)
        return self.config.source

    def wrap(self, model: "torch.nn.Module", **ddp_kwargs: Any) -> "torch.nn.Module":
        """Move a model to the rank's device and have its gradients averaged over all ranks.

        Inside `steps` each rank's gradient counts by its share of the global batch, so that an
        uneven tail, also one smaller than the world, gives exactly the gradient of the mean
        loss over the global batch. Several backward passes in a step add up;
        `ctx.micro_batches` makes them, and has the ranks talk in the last one alone.

        Args:
            model: equal on all ranks; its loss is the mean over the local samples.
            **ddp_kwargs: for torch's DistributedDataParallel.
        """
        from prefect_torch_ddp.rank.gradients.share_weights import wrap_model  # noqa: PLC0415 - loads torch

        return wrap_model(model, self._state, self.device, self.world_size, ddp_kwargs)

    def loader(
        self,
        dataset: "Dataset[Any] | Sharded",
        *,
        global_batch_size: int,
        shuffle: bool = True,
        drop_last: bool = False,
        seed_samples: "SeedSamples" = True,
        **dataloader_kwargs: Any,
    ) -> "RankLoader":
        """Make a loader of this rank's share of each global batch: every sample once per epoch,
        in an order for any world size.

        Args:
            dataset: map-style, or in shards: with shards(), num_samples(shard) and
                iter_shard(shard).
            global_batch_size: samples per step over all ranks together.
            shuffle: a new order each epoch, from the run's seed.
            drop_last: leave out the uneven tail of an epoch.
            seed_samples: seed python, numpy and torch in worker processes for each sample, so
                that augmentation is the same on any number of ranks and workers. "torch": torch
                alone, where nothing draws from another one, as torchvision's v2 transforms do;
                False: none, where nothing is drawn.
            **dataloader_kwargs: anything else for torch's DataLoader, such as num_workers or
                collate_fn.
        """
        from prefect_torch_ddp.data.loader import RankLoader  # noqa: PLC0415 - loads torch

        return RankLoader(
            dataset,
            global_batch_size=global_batch_size,
            rank=self.rank,
            world_size=self.world_size,
            seed=self.seed,
            shuffle=shuffle,
            drop_last=drop_last,
            virtual_ranks=self.config.virtual_ranks if self._state.virtual is not None else None,
            keep_ids=self.config.ledger,
            seed_samples=seed_samples,
            **dataloader_kwargs,
        )

    def track(self, **objects: Any) -> None:
        """Put objects into every checkpoint, and restore them in place where there is one to
        resume from.

        Call it on every rank, with the same names, before `steps`. Their state is taken to be
        equal on all ranks; random generators, the place in the data and the step counters come
        along by themselves.

        Args:
            **objects: anything with `state_dict` and `load_state_dict`: model, optimizer,
                scheduler, scaler, ...

        Raises:
            InvalidParamsError: an object can't be tracked, or its name is taken.
            CheckpointError: the checkpoint doesn't have it, or it doesn't fit.
        """
        self._parts.tracker.track(objects)

    def steps(self, loader: "RankLoader", *, epochs: int) -> Iterator[Any]:
        """Yield a batch per optimizer step until all epochs are done or all ranks agree to
        stop.

        A resumed run goes on in the middle of an epoch, where its checkpoint was made. A
        checkpoint that is due is written when the loop's body has ended. Batches stay on the
        device where the loader put them. On a rank whose share of a tail is empty the batch is
        a stand-in whose gradient counts for nothing. Called again, it numbers steps and epochs
        on; a resumed run passes calls that were over by, yet what stands behind them runs
        again: one call with all epochs, and `epoch_ended` in its body, has no such code.

        Args:
            loader: from `ctx.loader`.
            epochs: how often all samples are seen.
        """
        return self._parts.loop.run(loader, epochs)

    def micro_batches(
        self, batch: Any, *, max_samples: int | None = None
    ) -> Iterator[tuple[Any, float]]:
        """Yield (micro-batch, weight): gradient accumulation that is exact, also where ranks
        have uneven shares.

            optimizer.zero_grad()
            for (images, labels), weight in ctx.micro_batches(batch, max_samples=32):
                loss = cross_entropy(model(images), labels)
                (loss * weight).backward()
            optimizer.step()

        The gradient is that of the mean loss over the global batch, which ranks sum in the last
        backward pass alone. With a GradScaler, scale each weighted loss; after the loop
        unscale, then clip, then step. The rank's mean loss, to report, is `sum(loss * weight) /
        sum(weight)`: under elastic determinism the weights are parts of the global batch, and
        don't add up to 1. There the gradients come with the end of the loop.

        Args:
            batch: from `steps`: a tensor, or tuples, lists and mappings of tensors, whose first
                dimension is the sample's.
            max_samples: how many samples a micro-batch has at most; None: all of this rank's.

        Raises:
            InvalidParamsError: the batch can't be cut; names the part.
        """
        from prefect_torch_ddp.rank.gradients.micro_batches import micro_batches  # noqa: PLC0415 - loads torch

        return micro_batches(batch, self._state, max_samples)

    def report(self, **metrics: Any) -> None:
        """Record metrics of this step; never waits for a rank, a device or the storage.

        Several calls in one step make one record. Outside of `steps` each call makes its own.

        Args:
            **metrics: numbers or 0-d tensors.

        Raises:
            InvalidParamsError: one isn't a single real number; names it.
        """
        self._parts.reporter.report(metrics)
        self._parts.link.heartbeat.progress()

    def checkpoint(self, *, force: bool = False) -> None:
        """Ask for a checkpoint, on every rank alike: in `steps` at the end of this step,
        elsewhere at once.

        In `steps` those that are due come without asking, and a step has one. Elsewhere each
        call that forces one makes one, known by the next number where that of the step is
        taken. In a loop of your own, without `steps`, they count 0, 1, 2, ... A resumed run
        finds what it tracks as it was at the newest one, and where there are no `steps` the
        random generators, too.

        Args:
            force: also when none is due.
        """
        if self._state.share is not None:
            self._state.save_wanted |= force
        elif force:
            self._parts.tracker.save_outside()
        else:
            self._parts.tracker.save_if(forced=False)

    def request_stop(self, reason: str) -> None:
        """Have all ranks end `steps` after the same step, and a retry of the run adds no step.

        That is this step where all ranks ask in it, and else this one or the next, where ranks
        are in step.
        """
        logger.info("rank %d asks to stop after step %d: %s", self.rank, self.step, reason)
        self._state.stop_wanted = True

    def save(self, path: str, data: bytes | str) -> None:
        """Write a file to the run's results, at once: `runs/<run id>/results/<attempt>/<path>`,
        which `read_result` finds.

        Each attempt has files of its own, so that one that was held up can't replace a newer
        one's.

        Args:
            path: relative, with forward slashes.
            data: the whole content; text is written as UTF-8.

        Raises:
            InvalidParamsError: the data are neither bytes nor text.
            BadKeyError: the path would leave the results.
            SupersededError: a newer attempt of this training has begun.
            StorageError: it can't be written.
        """
        from prefect_torch_ddp.checkpoint.attempts import refuse_superseded  # noqa: PLC0415
        from prefect_torch_ddp.checkpoint.run_files import write_result  # noqa: PLC0415

        if self.stage in (
            "train",
            "task",
        ):  # the others claim no attempt, so that none can supersede them
            refuse_superseded(self.config.storage, self.run_id, self.attempt)
        write_result(self.config.storage, self.run_id, self.attempt, path, data)

    def close(self, *, failed: bool = False) -> None:
        """Write what is pending: the last checkpoint, the metrics. Doing it twice is no error.

        Args:
            failed: the training ended by an exception: no last checkpoint is made, and nothing
                here raises.

        Raises:
            CheckpointError: the last checkpoint can't be written.
            StorageError: metrics, or the ledger, can't be written.
        """
        self._parts.close(failed=failed)

    def __enter__(self) -> Self:
        """Use it in a `with`."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close it."""
        self._parts.close(failed=kind is not None, error=error)

    def outcome(self) -> dict[str, Any]:
        """Return what a closed training amounts to, as plain values: counts, checkpoints, the
        step it was resumed from.
        """
        return self._parts.outcome()

    def export_model(self, workload: str) -> str | None:
        """Leave a closed training's model to others, on rank 0; return its URI, None where none
        was tracked or it was stopped.
        """
        return self._parts.export_model(workload)
