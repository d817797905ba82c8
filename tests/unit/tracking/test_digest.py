"""Equal arguments of a call have one digest; see also test_run_id."""

import pytest
import torch

from prefect_torch_ddp.tracking.digest import value_digest


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12.0).reshape(4, 3)[:, 0],
        torch.ones(6)[::2],
        torch.ones(1).expand(5),
        torch.tensor([True, False, True])[::2],
        torch.arange(6.0).reshape(2, 3).T,
    ],
    ids=["a column", "every second", "expanded", "booleans", "turned"],
)
def test_how_a_tensor_lies_in_memory_does_not_count(tensor: torch.Tensor) -> None:
    """A view that isn't contiguous has the digest of its copy; as a parameter and in a dict too."""
    whole = tensor.clone(memory_format=torch.contiguous_format)
    assert value_digest(tensor) == value_digest(whole)
    assert value_digest({"x": torch.nn.Parameter(tensor, requires_grad=False)}) == value_digest(
        {"x": torch.nn.Parameter(whole, requires_grad=False)}
    )
