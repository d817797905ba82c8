"""Trainings by Transformers' and Lightning's Trainer, the same under torchrun and in a `ddp_task`,
that train on command, block by block, and save at the end of each block."""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from prefect_torch_ddp import RankContext, current_context
from tests.benchmarks.steady import WARM_UP, Turns, now, tell, wait_for_turn

NUM_TOKENS, VOCABULARY = 64, 512
LOG_EVERY = 10
MEASURED = "measured.json"


class Texts(Dataset[Any]):
    """Random texts."""

    def __init__(self, num_texts: int) -> None:
        self._num_texts = num_texts
        generator = torch.Generator().manual_seed(1)
        self._tokens = torch.randint(0, VOCABULARY, (256, NUM_TOKENS), generator=generator)

    def __len__(self) -> int:
        return self._num_texts

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = self._tokens[index % len(self._tokens)]
        return {"input_ids": tokens, "labels": tokens}


class Blocks:
    """Times the blocks of a training, of which a Trainer's callback tells it each step.

    A block's last step isn't a part of its pace: the save follows, and is timed by itself.
    """

    def __init__(self, turns: Turns) -> None:
        ((self.local_batch, num_steps),) = turns.works
        self.size = WARM_UP + num_steps + 1
        self.num_steps = self.size * turns.num_turns
        self._turns, self._num_steps, self._step = turns, num_steps, 0
        self._began = self._pace_s = self._ended = self._began_cpu_s = 0.0
        self._stalls_s: list[float] = []
        self._cpu_s: list[float] = []

    def begin_step(self) -> None:
        """Notice that a step begins; before a block's first one wait for one's turn."""
        at = self._step % self.size
        if at == 0:
            if self._step:
                self._stalls_s.append(now(self._turns) - self._ended)
                tell(self._turns, repr(self._pace_s))
            else:
                tell(self._turns, "ready")
            wait_for_turn(self._turns)
        elif at == WARM_UP:
            self._began, self._began_cpu_s = now(self._turns), time.process_time()
        elif at == self.size - 1:
            self._pace_s = (now(self._turns) - self._began) / self._num_steps
            self._cpu_s.append((time.process_time() - self._began_cpu_s) / self._num_steps)

    def end_step(self) -> None:
        """Notice that a step's parameters are there, before anything is saved."""
        self._step += 1
        self._ended = now(self._turns)

    def end(self) -> None:
        """Tell of the last block; its save is left out, since the training ends in it too."""
        tell(self._turns, repr(self._pace_s))
        if torch.distributed.get_rank() == 0:
            measured = {"stalls_s": self._stalls_s, "cpu_s": self._cpu_s}
            Path(self._turns.folder, MEASURED).write_text(json.dumps(measured))


def model_of(width: int) -> Any:
    """Return a GPT-2 of four layers."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    size = {"n_positions": NUM_TOKENS, "n_embd": width, "n_layer": 4, "n_head": 4}
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, **size))


def transformers(turns: Turns) -> None:
    """Train by Transformers' Trainer, with `attach` in a gang and its own saves elsewhere."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from prefect_torch_ddp.integrations.transformers import attach

    blocks, is_ours = Blocks(turns), current_context() is not None

    class Timing(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            blocks.begin_step()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            blocks.end_step()

    args = TrainingArguments(
        output_dir=str(Path(turns.folder, "out")),
        max_steps=blocks.num_steps,
        per_device_train_batch_size=blocks.local_batch,
        logging_steps=LOG_EVERY,
        save_strategy="no" if is_ours else "steps",
        save_steps=blocks.size,
        save_total_limit=1,
        use_cpu=turns.device == "cpu",
        disable_tqdm=True,
        report_to=[],
    )
    texts = Texts(10**6)
    trainer = Trainer(
        model=model_of(turns.width), args=args, train_dataset=texts, callbacks=[Timing()]
    )
    trainer.train(resume_from_checkpoint=attach(trainer))
    blocks.end()


def lightning(turns: Turns) -> None:
    """Train by Lightning's Trainer, with `attach` in a gang and its own saves elsewhere."""
    import pytorch_lightning as pl
    from pytorch_lightning.callbacks import ModelCheckpoint

    from prefect_torch_ddp.integrations.lightning import attach

    blocks, is_ours = Blocks(turns), current_context() is not None

    class Net(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = model_of(turns.width)

        def training_step(self, batch: Any, _index: int) -> Any:
            loss = self.model(**batch).loss
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

    class Timing(pl.Callback):  # type: ignore[misc]
        def on_train_batch_start(self, *_: Any) -> None:
            blocks.begin_step()

        def on_train_batch_end(self, *_: Any) -> None:
            blocks.end_step()

    saves = ModelCheckpoint(Path(turns.folder, "out"), every_n_train_steps=blocks.size)
    trainer = pl.Trainer(
        accelerator="cpu" if turns.device == "cpu" else "gpu",
        strategy="ddp",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
        max_steps=blocks.num_steps,
        log_every_n_steps=LOG_EVERY,
        callbacks=[Timing()] if is_ours else [Timing(), saves],
        enable_checkpointing=not is_ours,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
        default_root_dir=turns.folder,
    )
    loader = DataLoader(Texts(10**6), blocks.local_batch, shuffle=True)
    trainer.fit(Net(), loader, ckpt_path=attach(trainer))
    blocks.end()


PROGRAMS = {"transformers": transformers, "lightning": lightning}


def run(_ctx: RankContext, program: str, turns: Turns) -> None:
    """Train by one of them on a rank of a gang."""
    PROGRAMS[program](turns)


if __name__ == "__main__":
    PROGRAMS[sys.argv[1]](Turns(**json.loads(sys.argv[2])))
