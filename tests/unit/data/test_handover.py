"""What is packed for the rank arrives as it was; the process is both here, worker and rank."""

import os
import pickle
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch

from prefect_torch_ddp.data.handover import MOST_KEPT, Packed, Tagged


def arrive(data: Any) -> tuple[Any, int]:
    """Return what the rank gets, and how many storages it opens in the worker itself."""
    packed = Packed.of(Tagged((), data))
    return pickle.loads(ForkingPickler.dumps(packed)).data, len(packed.storages)


TENSORS: dict[str, tuple[Any, int]] = {
    "floats": (torch.randn(3, 4), 1),
    "a number": (torch.tensor(7), 1),
    "flags": (torch.tensor([True, False]), 1),
    "bfloat16": (torch.randn(5).bfloat16(), 1),
    "transposed": (torch.randn(3, 4).T, 1),
    "channels last": (torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last), 1),
    "expanded": (torch.randn(3, 1).expand(3, 4), 1),
    "a slice": (torch.arange(10)[4:8:2], 1),
    "none": (torch.empty(0, 3), 0),
    "conjugate": (torch.randn(3, dtype=torch.complex64).conj(), 1),
    "large": (torch.zeros(MOST_KEPT + 1, dtype=torch.uint8), 0),
    "the largest": (torch.ones(MOST_KEPT, dtype=torch.uint8), 1),
    "a weight": (torch.ones(2, requires_grad=True), 1),
    # Each would take a file descriptor of the rank's.
    "rows of one storage": (torch.randn(300, 10).unbind(), 1),
    # The worker keeps so much of a batch and no more.
    "five large": ([torch.full((MOST_KEPT // 3,), i, dtype=torch.uint8) for i in range(5)], 3),
}


@pytest.mark.parametrize(("data", "num_opened"), TENSORS.values(), ids=TENSORS)
def test_tensors_arrive_as_they_were(data: Any, num_opened: int) -> None:
    """Of any kind, in any layout; what is unusual or large goes torch's own way."""
    result, opened = arrive(data)
    assert opened == num_opened
    pairs = [(result, data)] if isinstance(data, torch.Tensor) else zip(result, data, strict=True)
    for arrived, tensor in pairs:
        assert torch.equal(arrived, tensor)
        same = ("dtype", "shape", "layout", "requires_grad", "device")
        assert all(getattr(arrived, name) == getattr(tensor, name) for name in same)
        assert arrived.stride() == tensor.stride()


def test_a_batch_arrives_with_its_structure() -> None:
    """Tensors in dicts and tuples, what is shared among them, and what is no tensor."""
    image, weight = torch.randn(2, 3), torch.nn.Parameter(torch.ones(2))
    (arrived, opened) = arrive({"of": (image, image[1], image), "weight": weight, "names": ["a"]})
    first, row, again = arrived["of"]
    assert (opened, again is first, arrived["names"]) == (2, True, ["a"])
    assert isinstance(arrived["weight"], torch.nn.Parameter)
    first[1] = 5.0
    assert torch.equal(row, torch.full((3,), 5.0)), "rows of one image stay rows of it"


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_a_nested_tensor_arrives() -> None:
    """It has no shape."""
    parts = [torch.ones(2), torch.zeros(3)]
    arrived, _ = arrive(torch.nested.nested_tensor(parts))
    assert all(map(torch.equal, arrived.unbind(), parts))


def test_what_cannot_be_handed_over_is_an_error_of_the_worker() -> None:
    """In the thread in which torch pickles nobody would hear of it, and the rank would wait."""
    with pytest.raises((AttributeError, pickle.PicklingError), match="lambda"):
        Packed.of(Tagged((), (torch.ones(2), lambda: None)))


def test_memory_that_is_gone_is_never_read_from_elsewhere() -> None:
    """Where the descriptor's number is another file's by now, that isn't taken for the batch."""
    packed = Packed.of(Tagged((), torch.ones(3)))
    number = packed.storages[0]._share_fd_cpu_()[0]
    with Path(os.devnull).open("rb") as other:
        packed.storages.clear()
        with pytest.raises(FileNotFoundError, match=f"/proc/{os.getpid()}/fd/{number}"):
            pickle.loads(packed.pickled)
        os.dup2(other.fileno(), number)
    try:
        with pytest.raises(RuntimeError, match=f"gone from the loader's worker.* {os.getpid()}"):
            pickle.loads(packed.pickled)
    finally:
        os.close(number)
