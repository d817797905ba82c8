"""What is pickled for the rank arrives as it was; the process is both here, worker and rank."""

import pickle
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch

from prefect_torch_ddp.data.tagged import Pickled, Tagged


def arrive(data: Any) -> Any:
    """Return what the rank gets."""
    return pickle.loads(ForkingPickler.dumps(Pickled.of(Tagged((), data)))).data


def test_a_batch_arrives_with_its_structure_and_its_ids() -> None:
    """Tensors in dicts and tuples, what is shared among them, and what is no tensor."""
    image, weight = torch.randn(2, 3), torch.nn.Parameter(torch.ones(2))
    arrived = arrive({"of": (image, image[1], image), "weight": weight, "names": ["a"]})
    first, row, again = arrived["of"]
    assert torch.equal(first, image)
    assert (again is first, arrived["names"]) == (True, ["a"])
    assert isinstance(arrived["weight"], torch.nn.Parameter)
    first[1] = 5.0
    assert torch.equal(row, torch.full((3,), 5.0)), "rows of one image stay rows of it"
    batch = Tagged((7, 9), torch.ones(2), nones=(9,))
    back = pickle.loads(ForkingPickler.dumps(Pickled.of(batch)))
    assert (back.samples, back.nones) == ((7, 9), (9,))


def test_what_cannot_be_handed_over_is_an_error_of_the_worker() -> None:
    """In the thread in which torch pickles nobody would hear of it, and the rank would wait."""
    with pytest.raises((AttributeError, pickle.PicklingError), match="lambda"):
        Pickled.of(Tagged((), (torch.ones(2), lambda: None)))


def test_a_batch_that_is_pinned_keeps_what_it_says() -> None:
    """The DataLoader pins what collate_fn gave."""
    batch = Tagged((0, 1), "data", nones=(1,))
    assert batch.pin_memory() == batch
