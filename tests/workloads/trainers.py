"""Trainings with other libraries' trainers, on tiny models made from a config."""

import hashlib
import os
import random
import signal
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from prefect_torch_ddp import InvalidParamsError, RankContext, current_context
from prefect_torch_ddp.checkpoint.manifest import list_manifests
from tests.support.waiting import wait_until


def digest_of(model: torch.nn.Module) -> str:
    """Return the digest of a model's weights."""
    return digest_of_state(model.state_dict())


def digest_of_state(state: dict[str, torch.Tensor]) -> str:
    """Return the digest of a state dict of dense tensors."""
    digest = hashlib.sha256()
    for name, tensor in sorted(state.items()):
        digest.update(name.encode() + tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


class Texts(torch.utils.data.Dataset):
    """Random texts of eight tokens."""

    def __init__(self, size: int = 40) -> None:
        self._tokens = torch.randint(0, 50, (size, 8), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._tokens[index], "labels": self._tokens[index]}


class Drawn(torch.utils.data.Sampler[int]):
    """Draws samples by the generators that it is given."""

    def __init__(self, generators: Any, draw: Callable[[Any], int], size: int = 40) -> None:
        self.generators, self._draw, self._size = generators, draw, size

    def __iter__(self) -> Iterator[int]:
        return (int(self._draw(self.generators)) for _ in range(len(self)))

    def __len__(self) -> int:
        return self._size


class Permuted(torch.utils.data.Sampler[int]):
    """Draws an epoch's order as it begins, by the global generator if it is given none."""

    def __init__(self, generator: torch.Generator | None = None) -> None:
        self.generator = generator

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(40, generator=self.generator).tolist())

    def __len__(self) -> int:
        return 40


class Numbered(torch.utils.data.Sampler[Any]):
    """Draws an epoch's order by its number, as torch's DistributedSampler does; of numbers, or of
    batches of them."""

    def __init__(self, size: int = 40, batch_size: int | None = None) -> None:
        self._size, self._batch_size, self.epoch = size, batch_size, 0

    def set_epoch(self, epoch: int) -> None:
        """Take the number of the epoch that begins."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        order = torch.randperm(self._size, generator=torch.Generator().manual_seed(self.epoch))
        return iter((order.view(-1, self._batch_size) if self._batch_size else order).tolist())

    def __len__(self) -> int:
        return self._size // (self._batch_size or 1)


SAMPLERS: dict[str, Callable[[], torch.utils.data.Sampler[int]]] = {
    "global": Permuted,
    "own": lambda: Permuted(torch.Generator().manual_seed(4)),
    "python": lambda: Drawn(random.Random(4), lambda each: each.randrange(40)),
}
"""Samplers that a Trainer is given, by where they draw from."""


def masked(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Collate texts with a tenth of their tokens replaced, drawn by the global generator."""
    tokens = torch.stack([each["input_ids"] for each in samples])
    inputs = tokens.masked_fill(torch.rand(tokens.shape) < 0.1, 0)
    return {"input_ids": inputs, "labels": tokens}


DieAt = int | Callable[[int], None] | None
"""The step in whose first attempt rank 1 is killed, or what is called with each step."""


def die_once(marks: Path, step: int, at: DieAt, rank: int = 1) -> None:
    """Kill this rank in a step, in the first attempt."""
    if callable(at):
        at(step)
        return
    ctx = current_context()
    if (
        ctx is not None
        and ctx.attempt == 1
        and step == at
        and ctx.rank == min(rank, ctx.world_size - 1)
    ):
        (marks / f"killed-at-{step}").touch()
        os.kill(os.getpid(), signal.SIGKILL)


def die_once_saved(marks: Path, at: int, step: int, saved: int = 1) -> None:
    """Kill the last rank so, once a checkpoint of this step or a later one is committed: it is
    written while steps are made."""
    ctx = current_context()
    assert ctx is not None
    if step == at and ctx.attempt == 1 and ctx.rank == min(1, ctx.world_size - 1):
        manifests = partial(list_manifests, ctx.config.storage, ctx.run_id)
        wait_until(lambda: any(each.step >= saved for each in manifests()))
    die_once(marks, step, at)


def with_sampler(name: str | None) -> Any:
    """Return Transformers' Trainer, with this one of SAMPLERS if there is a name."""
    from transformers import Trainer

    class Sampled(Trainer):
        def _get_train_sampler(self, *given: Any, **named: Any) -> Any:
            return super()._get_train_sampler(*given, **named) if not name else SAMPLERS[name]()

    return Sampled


def transformers(
    ctx: RankContext,
    folder: str,
    die_at: DieAt,
    *,
    stop_at: int | None = None,
    patience: int | None = None,
    ends_epoch_at: int | None = None,
    cuts_epoch_at: int | None = None,
    cuda: bool = False,
    sampler: str | None = None,
    num_texts: int = 40,
    collator: Callable[[Any], Any] | None = None,
    **options: Any,
) -> str:
    """Train a GPT-2 with dropout by Transformers' Trainer; return the digest of its weights.

    The options are those of its TrainingArguments that aren't as in other tests. After the first
    one, no evaluation counts as better, so that a patience ends it. A callback may end the epoch
    after a step, and at the epoch's end the training, or only cut the epoch.
    """
    from transformers import (
        EarlyStoppingCallback,
        GPT2Config,
        GPT2LMHeadModel,
        TrainerCallback,
        TrainingArguments,
        set_seed,
    )

    from prefect_torch_ddp.integrations.transformers import attach

    class Killer(TrainerCallback):
        def on_substep_end(self, *_: Any, **__: Any) -> None: ...

        def on_step_begin(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
            die_once(Path(folder), state.global_step + 1, die_at)
            if state.global_step == stop_at:
                ctx.request_stop("the test asks for it")

        def on_step_end(self, _args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_epoch_stop |= state.global_step in (ends_epoch_at, cuts_epoch_at)

        def on_epoch_end(self, _args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop |= state.global_step == ends_epoch_at

    set_seed(7)
    config = GPT2Config(vocab_size=50, n_positions=8, n_embd=16, n_layer=2, n_head=2)
    usual: dict[str, Any] = {
        "num_train_epochs": 3,
        "per_device_train_batch_size": 4,
        "logging_steps": 2,
        "save_strategy": "no",
        "use_cpu": not cuda,
        "disable_tqdm": True,
        "report_to": [],
        "seed": 7,
    }
    callbacks: list[TrainerCallback] = [Killer()]
    if patience is not None:
        usual |= {
            "eval_strategy": "steps",
            "metric_for_best_model": "eval_loss",
            "restore_callback_states_from_checkpoint": True,
        }
        callbacks.append(EarlyStoppingCallback(patience, early_stopping_threshold=9.0))
    args = TrainingArguments(str(Path(folder) / "out"), **usual | options)
    trainer = with_sampler(sampler)(
        model=GPT2LMHeadModel(config),
        args=args,
        data_collator=collator,
        train_dataset=Texts(num_texts),
        eval_dataset=Texts(),
        callbacks=callbacks,
    )
    trainer.train(resume_from_checkpoint=attach(trainer))
    return f"{trainer.state.global_step} {digest_of(trainer.model)}"


def stopped_transformers(ctx: RankContext, folder: str) -> str:
    """Train so until the sixth step, in which every rank asks for the end."""
    return transformers(ctx, folder, None, stop_at=5)


def refused_transformers(
    _ctx: RankContext, folder: str, options: list[dict[str, Any]]
) -> list[str]:
    """Attach a Trainer with each of these options, or EarlyStoppingCallback; return the errors."""
    from transformers import EarlyStoppingCallback, Trainer, TrainingArguments

    from prefect_torch_ddp.integrations.transformers import attach

    said = []
    for chosen in options:
        rest = dict(chosen)
        callbacks = [EarlyStoppingCallback()] if rest.pop("stops_early", False) else []
        args = TrainingArguments(output_dir=folder, report_to=[], **rest)
        model = torch.nn.Linear(1, 1)
        trainer = Trainer(model=model, args=args, train_dataset=Texts(), callbacks=callbacks)
        try:
            attach(trainer)
        except InvalidParamsError as error:
            said.append(str(error))
        else:
            said.append("attached")
    return said


def with_two_optimizers(net: Any, folder: str, die_at: DieAt) -> type:
    """Return a net's class whose training, by hand, makes a step of each of two optimizers."""

    class TwoOptimizers(net):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, _index: int) -> None:
            die_once(Path(folder), self.global_step // 2 + 1, die_at)
            for optimizer in self.optimizers():
                optimizer.zero_grad()
                self.manual_backward(self.loss_of(batch))
                optimizer.step()

        def configure_optimizers(self) -> Any:
            return [torch.optim.Adam(self.layers[at].parameters(), 0.01) for at in (0, 2)]

    return TwoOptimizers


def validation_counter() -> Any:
    """Return a callback of Lightning's that counts validations over all attempts."""
    import pytorch_lightning as pl

    class Counter(pl.Callback):
        num_validations = 0

        def state_dict(self) -> dict[str, int]:
            return {"validations": self.num_validations}

        def load_state_dict(self, state_dict: dict[str, int]) -> None:
            self.num_validations = state_dict["validations"]

        def on_validation_end(self, trainer: pl.Trainer, _module: Any) -> None:
            self.num_validations += not trainer.sanity_checking

    return Counter()


def early_stopping(patience: int | None) -> list[Any]:
    """Return Lightning's, for which no validation after the first one is better; None: nothing."""
    import pytorch_lightning as pl

    return [] if patience is None else [pl.callbacks.EarlyStopping("val_loss", 9.0, patience)]


def lightning(ctx: RankContext, folder: str, die_at: DieAt, **chosen: Any) -> str:
    """Train a net with dropout by Lightning's Trainer; return the digest of its weights, and the
    number of validations."""
    import pytorch_lightning as pl

    from prefect_torch_ddp.integrations.lightning import attach

    class Net(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.Sequential(
                torch.nn.Linear(8, 16), torch.nn.Dropout(0.3), torch.nn.Linear(16, 1)
            )

        def training_step(self, batch: Any, _index: int) -> torch.Tensor:
            die_once(Path(folder), self.global_step + 1, die_at)
            if self.global_step + 1 == chosen.get("stop_at"):
                ctx.request_stop("the test asks for it")
            return self.loss_of(batch)

        def loss_of(self, batch: Any) -> torch.Tensor:
            loss = self.layers(batch["input_ids"] / 50).square().mean()
            self.log("loss", loss)
            return loss

        def validation_step(self, batch: Any, _index: int) -> None:
            self.log("val_loss", self.layers(batch["input_ids"] / 50).mean(), sync_dist=True)

        def val_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(Texts(), batch_size=4)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.Adam(self.parameters(), 0.01)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
            return [optimizer], [{"scheduler": schedule, "interval": chosen.get("each", "epoch")}]

    pl.seed_everything(7)
    counter = validation_counter()
    data = torch.utils.data.DataLoader(Texts(), batch_size=4, shuffle=True)
    model = (with_two_optimizers(Net, folder, die_at) if chosen.get("two_optimizers") else Net)()
    trainer = pl.Trainer(
        accelerator="gpu" if chosen.get("cuda") else "cpu",
        strategy="ddp",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
        max_epochs=chosen.get("max_epochs", 3),
        max_steps=chosen.get("max_steps", -1),
        accumulate_grad_batches=chosen.get("accumulate", 1),
        val_check_interval=chosen.get("val_check_interval"),
        limit_val_batches=chosen.get("val_batches"),
        callbacks=[counter, *early_stopping(chosen.get("patience"))],
        log_every_n_steps=2,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
        default_root_dir=folder,
    )
    trainer.fit(model, data, ckpt_path=attach(trainer))
    return f"{trainer.global_step} {digest_of(model)} {counter.num_validations}"


def accelerate(ctx: RankContext, folder: str, die_at: DieAt, **chosen: Any) -> str:
    """Train a net with dropout by Accelerate, from a shuffled loader; return the digest of its
    weights."""
    from accelerate import Accelerator, DataLoaderConfiguration
    from accelerate.utils import set_seed

    from prefect_torch_ddp.integrations.accelerate import attach

    set_seed(7)
    config = DataLoaderConfiguration(use_seedable_sampler=chosen.get("seedable", False))
    accelerator = Accelerator(
        cpu=not chosen.get("cuda"),
        gradient_accumulation_steps=chosen.get("accumulate", 1),
        dataloader_config=config,
    )
    generator = torch.Generator().manual_seed(1)
    rows = torch.utils.data.TensorDataset(torch.randn(40, 8, generator=generator))
    net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.3), torch.nn.Linear(16, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.9)
    of: dict[str, Any] = {"sampler": Numbered()} if chosen.get("numbered") else {"shuffle": True}
    loader = torch.utils.data.DataLoader(rows, batch_size=4, **of)
    model, optimizer, loader, scheduler = accelerator.prepare(net, optimizer, loader, scheduler)
    loop = attach(accelerator)
    calls = chosen.get("calls", 1)
    batches = (loop.batches(loader, epochs=3 // calls) for _ in range(calls))
    for (batch,) in chain.from_iterable(batches):
        die_once(Path(folder), loop.step + 1, die_at)
        if loop.step + 1 == chosen.get("stop_at"):
            ctx.request_stop("the test asks for it")
        with accelerator.accumulate(model):
            loss = model(batch).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        loss_by = {"mse": loss.item(), "of": {"batch": loss.item()}}
        accelerator.log({"loss": loss.item(), "by": loss_by, "phase": "warm"}, step=loop.step)
    return f"{loop.step} {digest_of(accelerator.unwrap_model(model))}"


def committed(ctx: RankContext, folder: str, die_at: DieAt) -> str:
    """Train a net with dropout in a loop of its own, which commits folders; return the digest of
    its weights."""
    torch.manual_seed(7)
    net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.3), torch.nn.Linear(16, 1))
    model = ctx.wrap(net)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    first = 0
    if ctx.committed is not None:
        state = torch.load(ctx.committed / "state.pt", weights_only=True)
        net.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
        torch.set_rng_state(torch.load(ctx.committed / f"generator-{ctx.rank}.pt"))
    else:
        torch.manual_seed(ctx.rank)
    step = first
    for step in range(first + 1, 16):
        die_once(Path(folder), step, die_at)
        loss = model(torch.randn(4, 8)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ctx.progress(step, 15)
        ctx.report(loss=loss)
        due = ctx.due(step)
        if due.save:
            new = ctx.checkpoint_folder / f"step-{step}"
            new.mkdir()
            torch.save(torch.get_rng_state(), new / f"generator-{ctx.rank}.pt")
            if ctx.rank == 0:
                parts = {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save({**parts, "step": step}, new / "state.pt")
            ctx.commit(new, step=step)
        if due.stop:
            break
    return f"{step} {digest_of(net)}"
