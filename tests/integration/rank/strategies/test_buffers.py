"""After each backward pass a wrapped model's buffers of any kind are rank 0's."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from prefect_torch_ddp import RankContext
from tests.support.ranks import config_for, train_on

KINDS = {
    "numbers": torch.zeros(3),
    "count": torch.tensor(0),
    "flags": torch.zeros(3, dtype=torch.bool),
    "halves": torch.zeros(5, dtype=torch.bfloat16),
    "doubles": torch.zeros(2, 3, dtype=torch.float64).t(),
    "waves": torch.zeros(1, dtype=torch.complex64),
    "nothing": torch.zeros(0),
    "grown": torch.zeros(1),
    "retyped": torch.zeros(3),
}
NETS: dict[str, dict[str, torch.Tensor]] = {
    "all kinds": KINDS,
    "a lazy conjugate": KINDS | {"conjugate": KINDS["waves"].conj()},
}


def filled(buffer: torch.Tensor, value: int) -> torch.Tensor:
    """Return a tensor of the same kind, all of one value."""
    new = torch.full_like(buffer.resolve_conj(), value)
    return new.conj() if buffer.is_conj() else new


class Net(nn.Module):
    """In training a forward pass changes the buffers, to another value on each rank."""

    def __init__(self, buffers: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1)
        self.next_value: int | None = None
        self.replaces = False
        for name, value in buffers.items():
            self.register_buffer(name, filled(value, 0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.next_value is not None:
            for name, buffer in dict(self.named_buffers()).items():
                if self.replaces:
                    setattr(self, name, filled(buffer, self.next_value))
                else:
                    if name == "grown":  # as the observers of a quantization do
                        buffer.resize_(len(buffer) + 1)
                    if name == "retyped":
                        buffer.data = torch.zeros(3, dtype=torch.int32)
                    buffer.fill_(self.next_value)
        y: torch.Tensor = self.linear(x)
        return y


def train(ctx: RankContext, kind: str) -> list[dict[str, torch.Tensor]]:
    """Return the buffers after each step."""
    given = NETS[kind]
    net = Net(given)
    model = ctx.wrap(net)
    found = []
    dataset = TensorDataset(torch.ones(8, 1))
    for (x,) in ctx.steps(ctx.loader(dataset, global_batch_size=2), epochs=1):
        net.next_value, net.replaces = 0 if ctx.rank else ctx.step, ctx.step % 2 == 0
        model(x).sum().backward()
        found.append({name: value.clone() for name, value in net.named_buffers()})
    for name in given:
        delattr(net, name)
    model(x).sum().backward()  # a model may also have none any more
    return found


@pytest.mark.parametrize("kind", NETS)
def test_buffers_are_those_of_rank_0(kind: str, tmp_path: Path) -> None:
    """Buffers may be changed in place or replaced in each step."""
    first, second = train_on(2, config_for(tmp_path), train, kind)
    assert len(first) == 4
    for step, (here, there) in enumerate(zip(first, second, strict=True), 1):
        assert list(here) == list(NETS[kind])
        for name, value in here.items():
            assert torch.equal(value, filled(value, step)), (step, name)
            assert torch.equal(value, there[name]), (step, name)
            given = torch.int32 if name == "retyped" else NETS[kind][name].dtype
            assert value.dtype == given
        assert len(here["grown"]) == 1 + (step + 1) // 2
