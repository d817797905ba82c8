"""Processes that are forked after Prefect has run end as they would without it."""

import multiprocessing

import pytest
import torch
from prefect import flow, task
from torch.utils.data import DataLoader, TensorDataset

pytestmark = pytest.mark.usefixtures("prefect_api")


def load_all() -> int:
    """Add up what two forked workers of a plain DataLoader load."""
    loader = DataLoader(
        TensorDataset(torch.arange(40)), batch_size=4, num_workers=2, multiprocessing_context="fork"
    )
    return sum(int(numbers.sum()) for (numbers,) in loader)


@task
def load_in_a_task() -> int:
    """Load, as one that measures a dataset's mean would."""
    return load_all()


@flow
def a_flow_that_loads() -> int:
    """Load in a task."""
    return load_in_a_task()


@flow
def in_a_child() -> int:
    """Do nothing."""
    return 7


def run_a_flow(answers: "multiprocessing.SimpleQueue[int]") -> None:
    """Run a flow in a process whose parent has run one before the fork."""
    answers.put(in_a_child())


def test_a_dataloader_forks_where_a_flow_has_run() -> None:
    """A DataLoader gives all batches in a task and after it, and no worker "exited
    unexpectedly"."""
    for load in (a_flow_that_loads, load_all) * 2:
        assert load() == sum(range(40))


def test_a_forked_child_runs_a_flow_of_its_own() -> None:
    """A forked child ends what it has started itself."""
    assert in_a_child() == 7
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    child = context.Process(target=run_a_flow, args=(answers,))
    child.start()
    assert answers.get() == 7
    child.join(60)
    assert child.exitcode == 0
