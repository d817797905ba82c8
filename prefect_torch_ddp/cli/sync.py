"""`sync`: bring an experiment tracker up to date with a run."""

import time
from typing import TYPE_CHECKING, Annotated

import typer

from prefect_torch_ddp.cli.options import STORAGE, RunArgument, StorageOption, find_run

if TYPE_CHECKING:
    from prefect_torch_ddp.tracking.trackers.sync import Synced
    from prefect_torch_ddp.tracking.trackers.tracker import Tracker


def sync(
    run: RunArgument,
    tracker: Annotated[
        str,
        typer.Option(
            metavar="TRACKER",
            help="mlflow, found by MLFLOW_TRACKING_URI; tensorboard, by TENSORBOARD_LOGGING_DIR; "
            "or wandb, by WANDB_DIR.",
        ),
    ],
    storage: StorageOption = STORAGE,
    follow: Annotated[
        bool, typer.Option("--follow", help="Until the run has ended, or Ctrl-C.")
    ] = False,
) -> None:
    """Bring a tracker up to date with a run.

    It gets what it hasn't yet, once, also while the run trains: the steps before its newest
    checkpoint, and all of them when the training has completed.
    """
    from prefect_torch_ddp.tracking.runs import storage_of
    from prefect_torch_ddp.tracking.trackers.follow import follow_run
    from prefect_torch_ddp.tracking.trackers.known import open_tracker
    from prefect_torch_ddp.tracking.trackers.sync import sync_run

    opened = storage_of(storage)
    to = open_tracker(tracker, opened)
    run_id = find_run(opened, run)

    def tell(synced: "Synced") -> None:
        print(said(to, run_id, synced), flush=True)

    if follow:
        follow_run(opened, run_id, to, wait=time.sleep, on_synced=tell)
    else:
        tell(sync_run(opened, run_id, to))
    if to.url:
        print(to.url)


def said(tracker: "Tracker", run_id: str, synced: "Synced") -> str:
    """Return what a sync did, in words."""
    from prefect_torch_ddp.results import count

    name, step = tracker.name, synced.step
    again = f"steps that {name} had were taken back, so its run was begun again; "
    none = "the run has no metrics" if synced.is_completed else "no step is final yet"
    upto = none if step < 0 else f"it has all up to step {step}"
    sent = f"{name} got {count(synced.num_sent, 'value')} of run {run_id}; {upto}"
    return f"{again if synced.is_again else ''}{sent}"
