"""Accelerate, under `torchrun --max-restarts`.

As in its example `by_feature/checkpointing.py`: `save_state` into a folder `step_N`, the newest of
which `load_state` loads, and `skip_first_batches` in the epoch that was interrupted. The loss goes
to a tracker of TensorBoard. The example deletes no folder; here all but two are deleted, which
its users write too.
"""

import shutil

import torch
from accelerate import Accelerator, skip_first_batches
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from tests.benchmarks.peers.training import (
    BATCH_SIZE,
    EPOCHS,
    FOLDER,
    LR,
    REPORT_EVERY,
    SAVE_EVERY,
    Observed,
    make_data,
    make_model,
)


def main() -> None:
    """Train on one rank."""
    accelerator = Accelerator(cpu=True, log_with="tensorboard", project_dir=FOLDER)
    accelerator.init_trackers("run")
    observed = Observed(accelerator.process_index)
    net = make_model()
    model, optimizer, loader = accelerator.prepare(
        net,
        torch.optim.AdamW(net.parameters(), lr=LR),
        DataLoader(make_data(), BATCH_SIZE, shuffle=True),
    )
    step = 0
    if saves := sorted(FOLDER.glob("step_*"), key=lambda folder: folder.stat().st_ctime):
        accelerator.load_state(saves[-1])
        step = int(saves[-1].name.removeprefix("step_"))
    for epoch in range(step // len(loader), EPOCHS):
        loader.set_epoch(epoch)
        num_done = step % len(loader)
        for inputs, targets in skip_first_batches(loader, num_done) if num_done else loader:
            loss = cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            step += 1
            if step % REPORT_EVERY == 0:
                with observed.reporting():
                    accelerator.log({"loss": loss.item()}, step=step)
            observed.step(step)
            if step % SAVE_EVERY == 0:
                accelerator.save_state(FOLDER / f"step_{step}")
                if accelerator.is_main_process:
                    shutil.rmtree(FOLDER / f"step_{step - 2 * SAVE_EVERY}", ignore_errors=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
