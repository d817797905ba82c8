"""Shows that states are copied, serialised and read back as they were."""

import collections
import random

import numpy as np
import pytest
import torch

from prefect_torch_ddp.checkpoint.serial import (
    Serializer,
    capture_generators,
    check_loadable,
    from_bytes,
    restore_generators,
    to_bytes,
)
from prefect_torch_ddp.checkpoint.staging import Staging
from prefect_torch_ddp.errors import CheckpointError


def test_a_copy_is_apart_from_what_it_copies() -> None:
    """Changing the state afterwards doesn't change the copy; keys, classes and a module's
    _metadata stay."""
    net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    state = {
        "net": net.state_dict(),
        "groups": [{"lr": 0.1, "params": [0, 1]}],
        "pair": (torch.ones(2), "text"),
    }
    copied = Staging().copy(state)
    expected = from_bytes(to_bytes(state))
    with torch.no_grad():
        net[0].weight.add_(1)
    state["groups"][0]["params"].append(2)
    state["pair"][0].zero_()
    assert torch.equal(copied["net"]["0.weight"], expected["net"]["0.weight"])
    assert copied["net"]._metadata == expected["net"]._metadata
    assert copied["groups"] == [{"lr": 0.1, "params": [0, 1]}]
    assert copied["pair"][0].tolist() == [1, 1]
    assert isinstance(copied["pair"], tuple)


def test_buffers_are_used_again() -> None:
    """The second copy takes the memory of the first."""
    staging = Staging()
    weights = torch.arange(6.0).reshape(2, 3).t()
    first = staging.copy([weights])[0].data_ptr()
    staging.begin()
    copied = staging.copy([weights + 1])[0]
    assert copied.data_ptr() == first
    assert torch.equal(copied, weights + 1)


def test_states_are_serialised_into_kept_memory() -> None:
    """Larger, smaller and equal ones after each other are the bytes of a plain torch.save, in
    the same place."""
    serializer = Serializer()
    small, large = {"x": torch.arange(5.0)}, {"y": torch.randn(300, 1000), "names": ["a"] * 9}
    looked_at = [serializer.to_view(state) for state in (small, large, small, large)]
    assert looked_at[1].obj is looked_at[3].obj
    assert looked_at[0].obj is not looked_at[1].obj, (
        "who still looks at memory that is too small keeps it"
    )
    assert looked_at[3] == to_bytes(large)
    assert looked_at[3].readonly
    assert serializer.to_view({}) == to_bytes({})


def test_tied_weights_are_stored_once() -> None:
    """As torch.save does."""
    weights = torch.randn(200, 200)
    copied = Staging().copy({"encoder": weights, "decoder": weights.detach()})
    assert len(to_bytes(copied)) < 1.5 * len(to_bytes({"encoder": weights}))


def test_a_state_that_would_need_code_to_read_is_refused_by_name() -> None:
    """A defaultdict in a state_dict loads with plain pickle only."""
    with pytest.raises(CheckpointError, match="tracked object 'meter' can't be read back"):
        check_loadable("meter", {"counts": collections.defaultdict(lambda: 0)})
    check_loadable("net", torch.nn.Linear(2, 2).state_dict())


def test_generators_go_on_where_they_were() -> None:
    """All of them: python, numpy and torch give the same numbers again, after a way through
    bytes."""

    def numbers() -> list[object]:
        numpy = [np.random.rand(), np.random.randn()]
        return [random.random(), random.gauss(0, 1), *numpy, torch.randn(3).tolist()]

    kept = capture_generators()
    random.gauss(0, 1)
    np.random.randn()
    state = from_bytes(to_bytes(capture_generators()))
    expected = numbers()
    assert numbers() != expected
    restore_generators(state)
    assert numbers() == expected
    restore_generators(kept)
