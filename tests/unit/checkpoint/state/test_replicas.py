"""Digests of replicas: what changes them, and what of the ranks' digests may differ."""

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from prefect_torch_ddp.checkpoint.state import comparison
from prefect_torch_ddp.checkpoint.state.comparison import Comparison
from prefect_torch_ddp.checkpoint.state.own_state import OwnState
from prefect_torch_ddp.checkpoint.state.replicas import Replicas, digests_of, sketch
from prefect_torch_ddp.errors import InvalidParamsError, ReplicasDifferError
from tests.support.tracked import Tracked


class Net(nn.Module):
    """Weights of many kinds: large and small, odd sizes, dtypes, layouts, views, none at all."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.large = nn.Parameter(torch.randn(301, 211))
        self.small = nn.Parameter(torch.randn(7, 3))
        self.short = nn.Parameter(torch.randn(40_001).bfloat16())
        self.turned = nn.Parameter(torch.randn(120, 300).t())
        self.waves = nn.Parameter(torch.randn(99, dtype=torch.complex64).conj())
        self.view = nn.Parameter(torch.randn(50_001)[1:])  # begins within a word
        self.scalar = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.count = nn.Parameter(torch.tensor(3), requires_grad=False)
        self.mask = nn.Parameter(torch.ones(5, dtype=torch.bool), requires_grad=False)
        self.order = nn.Parameter(torch.randperm(30_000), requires_grad=False)

    def flip(self, chance: random.Random) -> str:
        """Flip one bit of one tensor; return its name."""
        named = list(self.named_parameters())
        name, tensor = chance.choice([pair for pair in named if pair[1].numel()])
        tensor = tensor.detach()
        plain = torch.view_as_real(tensor.conj()) if tensor.is_conj() else tensor
        place = tuple(chance.randrange(size) for size in plain.shape)
        value = plain[place].clone().reshape(1).view(torch.uint8)
        bit = 0 if plain.dtype is torch.bool else chance.randrange(8)
        value[0 if plain.dtype is torch.bool else chance.randrange(len(value))] ^= 1 << bit
        with torch.no_grad():
            plain[place] = value.view(plain.dtype)[0]
        return name


def sketched(objects: dict[str, Any], wrapped: list[nn.Module] | None = None) -> Any:
    """Return rank 0's sketch of the objects, and a rank's digests of them."""
    found = sketch(objects, Replicas(wrapped or []))
    return found, found.digests()


def test_every_flipped_bit_is_found() -> None:
    """1,000 of 1,000, of parameters of any kind, each with its tensor's name."""
    net, chance = Net(), random.Random(1)
    own, found = sketched({"model": net})
    names = own.tensors["model"].names
    whole = found["digests"]["model"]
    num_found = 0
    for _ in range(1000):
        flipped = copy.deepcopy(net)
        name = flipped.flip(chance)
        digests = sketched({"model": flipped})[1]["digests"]["model"]
        pairs = zip(comparison._split(whole), comparison._split(digests), strict=True)
        differing = [names[i] for i, (one, other) in enumerate(pairs) if one != other]
        num_found += differing == [name]
    assert num_found == 1000


def test_the_layout_of_equal_weights_does_not_count() -> None:
    """Only values, shape and dtype do."""
    net, other = nn.Linear(300, 200), nn.Linear(300, 200)
    with torch.no_grad():
        other.weight.data = net.weight.detach().t().contiguous().t()
        other.bias.copy_(net.bias)
    first, second = (sketched({"model": each})[1]["digests"] for each in (net, other))
    assert first == second
    other.bias = nn.Parameter(other.bias.detach()[None])
    assert sketched({"model": other})[1]["digests"] != first


def test_orders_and_signs_count() -> None:
    """A permutation and a change of all signs, which leave many a sum as it was, are found."""
    net = nn.Linear(1, 1)
    for dtype in (torch.float32, torch.float64, torch.int64):
        x = torch.arange(1, 100_001).to(dtype)
        net.x = nn.Parameter(x, requires_grad=False)
        before = sketched({"model": net})[1]["digests"]
        for changed in (x[torch.randperm(100_000)], -x, x.roll(100_000 // 63)):
            net.x.data = changed
            assert sketched({"model": net})[1]["digests"] != before


def test_what_has_no_values_yet_is_no_difference() -> None:
    """Lazy modules before their first forward pass, weights on the meta device, sparse ones."""
    lazy = nn.Sequential(nn.LazyLinear(2), nn.Linear(2, 2, device="meta"))
    lazy.sparse = nn.Parameter(torch.eye(2).to_sparse())
    own, found = sketched({"model": lazy}, [lazy])
    Comparison().check(own, [found, sketched({"model": lazy}, [lazy])[1]])


def drifted(net: nn.Module) -> nn.Module:
    """Return a copy whose first parameter is another."""
    other = copy.deepcopy(net)
    with torch.no_grad():
        next(other.parameters()).add_(1)
    return other


def compare(
    first: dict[str, Any],
    *others: dict[str, Any],
    wrapped: tuple[str, ...] = (),
    is_first: bool = True,
    **fields: Any,
) -> None:
    """Compare what ranks track, of which rank 0 gave some to ctx.wrap; the last one with other
    fields of its found."""
    own, found = sketched(first, [first[name] for name in wrapped])
    reports = [found, *(sketched(each)[1] for each in others)]
    Comparison().check(own, [*reports[:-1], {**reports[-1], **fields}], is_first=is_first)


@pytest.mark.parametrize("why", ["wrapped", "in a tracked optimizer", "has a gradient"])
def test_a_replica_that_drifted_is_named(why: str) -> None:
    """By object, tensor and rank, with the rank that most others don't agree with."""
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    other = {"model": drifted(net), "opt": optimizer}
    if why == "has a gradient":
        net(torch.ones(1, 2)).sum().backward()
    same = {"model": net} if why != "in a tracked optimizer" else {"model": net, "opt": optimizer}
    wrapped = ("model",) if why == "wrapped" else ()
    said = r"replicas of 'model' have drifted apart: 0.weight differs on rank {} from the others"
    said += ".*seeded the same on every rank"
    with pytest.raises(ReplicasDifferError, match=said.format(1)):
        compare(same, other, wrapped=wrapped)
    with pytest.raises(ReplicasDifferError, match=said.format(2)):
        compare(same, same, other, wrapped=wrapped)
    with pytest.raises(ReplicasDifferError, match=said.format(0)):
        apart = {**same, "model": drifted(net)}
        apart["model"][0].weight.grad = net[0].weight.grad
        apart["opt"] = torch.optim.SGD(apart["model"].parameters(), 0.1)
        compare(apart, *[{**same, "opt": optimizer}] * 2)


def test_other_parameters_on_some_ranks_are_refused() -> None:
    """As is done with other names: a checkpoint has one rank's."""
    for other in (nn.Linear(2, 2, bias=False), nn.Linear(3, 2), nn.BatchNorm1d(2)):
        with pytest.raises(InvalidParamsError, match="on rank 1 have other names or shapes than"):
            compare({"model": nn.Linear(2, 2)}, {"model": other})


def averaging(net: nn.Module) -> dict[str, Any]:
    """Track a model and its average, which this rank has updated."""
    averaged = AveragedModel(net)
    averaged.update_parameters(drifted(net))
    return {"model": net, "ema": averaged}


HEALTHY = {
    "averaged weights that only rank 0 updates": (
        lambda net: {"model": net, "ema": AveragedModel(net)},
        averaging,
    ),
    "a copy of the model that only rank 0 averages": (
        lambda net: {"model": net, "ema": copy.deepcopy(net)},
        lambda net: {"model": net, "ema": drifted(net)},
    ),
    "running statistics": (
        lambda net: {"model": nn.Sequential(net, nn.BatchNorm1d(4))},
        lambda net: {"model": forward(nn.Sequential(net, nn.BatchNorm1d(4)))},
    ),
    "an optimizer's moments": (
        lambda net: {"optimizer": moments(net, 1.0)},
        lambda net: {"optimizer": moments(net, 2.0)},
    ),
    "orders of keys, devices, unknown objects": (
        lambda net: {"state": Tracked({"a": 1, "b": {"x", "y"}, "c": torch.device("cuda:0")})},
        lambda net: {"state": Tracked({"c": torch.device("cuda:1"), "b": {"y", "x"}, "a": 1})},
    ),
    "tensors of an object of one's own": (
        lambda net: {"shadow": Tracked([torch.zeros(3), {"x": torch.zeros(2)}])},
        lambda net: {"shadow": Tracked([torch.ones(3), {"x": torch.ones(2)}])},
    ),
    "what track_each takes": (
        lambda net: {"state": OwnState(Tracked(1), 0, 2)},
        lambda net: {"state": OwnState(Tracked(2), 1, 2)},
    ),
}


def moments(net: nn.Module, scale: float) -> torch.optim.Optimizer:
    """Make an optimizer with a state."""
    optimizer = torch.optim.Adam(net.parameters())
    for each in net.parameters():
        each.grad = torch.full_like(each, scale)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def forward(net: nn.Module) -> nn.Module:
    """Have a forward pass change the running statistics."""
    with torch.no_grad():
        net(torch.randn(8, 4))
    return net


@pytest.mark.parametrize("case", HEALTHY)
def test_what_may_differ_raises_nothing(case: str) -> None:
    """A healthy program's ranks agree in what they train, and in nothing else."""
    net = nn.Linear(4, 4)
    first, second = (make(net) for make in HEALTHY[case])
    compare(first, second, wrapped=("model",) if "model" in first else ())


def test_what_may_differ_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """Since the checkpoint has rank 0's."""
    net = nn.Linear(2, 2)
    own, found = sketched({"ema": net})
    other = sketched({"ema": drifted(net)})[1]
    comparison = Comparison()
    for _ in range(2):
        comparison.check(own, [found, found, other])
    (said,) = caplog.messages
    assert said.startswith(
        "'ema' isn't the same on all ranks: weight differs on rank 2 from rank 0"
    )


def test_ranks_on_other_processors_may_differ_in_last_bits(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Such a difference proves no drift, so it is logged and not refused."""
    net = nn.Linear(2, 2)
    tracked = [{"model": net}, {"model": drifted(net)}]
    compare(*tracked, wrapped=("model",), computes_on="another processor, 3 threads")
    assert "computes on another processor, device or number of threads" in caplog.text


DIFFERENT = {
    "a position": (Tracked(5), Tracked(10), "value"),
    "a number deep inside": (Tracked([{"x": (1, 2)}]), Tracked([{"x": (1, 3)}]), "value"),
    "a type": (Tracked(1), Tracked(1.0), "value"),
    "a text": (Tracked("a"), Tracked("b"), "value"),
    "a tensor's shape": (Tracked(torch.zeros(2)), Tracked(torch.zeros(3)), "value"),
    "a learning rate": (
        torch.optim.SGD([torch.zeros(1)], lr=0.1),
        torch.optim.SGD([torch.zeros(1)], lr=0.01),
        r"param_groups\[0\]\['lr'\]",
    ),
}


@pytest.mark.parametrize("case", DIFFERENT)
def test_what_is_no_tensor_has_to_be_the_same(case: str) -> None:
    """Every rank would get rank 0's: refused with object, entry, rank and the way out."""
    first, second, entry = DIFFERENT[case]
    said = rf"'own' differs between the ranks: {entry} on rank 1 isn't .*ctx.track_each\(own="
    with pytest.raises(InvalidParamsError, match=said):
        compare({"own": first}, {"own": second})


def test_what_differs_later_is_said_and_not_refused(caplog: pytest.LogCaptureFixture) -> None:
    """A training that has checkpoints isn't ended by a suspicion."""
    compare({"own": Tracked(1)}, {"own": Tracked(2)}, is_first=False)
    assert "call ctx.track_each(own=...)" in caplog.text


@pytest.mark.parametrize("value", [1.5, {"took": [0.25], "loss": (1.0, 2)}], ids=["own", "inside"])
def test_floats_that_differ_are_said_and_not_refused(
    caplog: pytest.LogCaptureFixture, value: Any
) -> None:
    """Times and running losses differ in healthy trainings."""
    other = {"took": [0.5], "loss": (3.0, 2)} if isinstance(value, dict) else 2.5
    compare({"own": Tracked(value)}, {"own": Tracked(other)})
    assert "'own' differs between the ranks: value on rank 1" in caplog.text


def test_what_only_rank_0_changes_is_let_alone(caplog: pytest.LogCaptureFixture) -> None:
    """Such as a history of what it evaluates: every rank gets rank 0's, which is what it is."""
    history = Tracked([])
    at_first = {"history": digests_of(history.state_dict())}
    other = sketch({"history": history}, at_first=at_first).digests()
    history.value += [{"step": 1, "accuracy": 0.5}, torch.ones(3)]
    own = sketch({"history": history}, at_first=at_first)
    Comparison().check(own, [own.digests(), other, other])
    assert caplog.messages == []
    changed = sketch({"history": Tracked([3])}, at_first=at_first).digests()
    with pytest.raises(InvalidParamsError, match="value on rank 2 isn't as on rank 0"):
        Comparison().check(own, [own.digests(), other, changed])


EQUAL_STATES: dict[str, tuple[Any, Any]] = {
    "numbers of numpy": ([1, 2.5, "a"], [np.int64(1), np.float64(2.5), np.str_("a")]),
    "order of a dict": ({"a": 1, 2: [3]}, {2: [3], "a": 1}),
    "order of a set": ({"a", "b", "c"}, {"c", "b", "a"}),
}
DIFFERENT_STATES: dict[str, tuple[Any, Any]] = {
    "one of many": ([*range(99), 7], [*range(99), 8]),
    "order of a list": ([1, 2], [2, 1]),
    "one beside an array": ([1, np.zeros(1)], [2, np.zeros(1)]),
    "one in a list of lists": ([[1], [2]], [[1], [3]]),
    "text and number": (["1"], [1]),
    "where texts end": (["a', 'b"], ["a", "b"]),
    "bytes": (b"a" * 99, b"a" * 98 + b"b"),
    "key of a dict": ({1: 2}, {3: 2}),
}


@pytest.mark.parametrize("kind", [*EQUAL_STATES, *DIFFERENT_STATES])
def test_digests_tell_plain_states_apart(kind: str) -> None:
    """They are the same for equal states, however they are made, and differ for others."""
    one, two = {**EQUAL_STATES, **DIFFERENT_STATES}[kind]
    is_same = digests_of({"x": one}) == digests_of({"x": two})
    assert is_same == (kind in EQUAL_STATES)


def test_digests_without_floats_leave_them_out_of_many() -> None:
    """Of a long list of plain values too, and nothing else of it."""
    digests = [digests_of(each)[""].split() for each in ([1, 0.5], [1, 0.25], [2, 0.5])]
    assert len({one for one, _ in digests}) == 3
    assert [digests[0][1] == each[1] for each in digests] == [True, True, False]


PASSES = {
    "one rank left one out": (
        [[[1, 1]], [[1, 1], [3, 0], [4, 1]]],
        "step 3: rank 1 0, the others 1",
    ),
    "each left one out": (
        [[[1, 1], [5, 0], [6, 1]], [[1, 1], [3, 0], [4, 1]], [[1, 1]]],
        "step 3: rank 1 0, the others 1",
    ),
    "one made more": ([[[1, 2]], [[1, 2]], [[1, 2], [2, 3]]], "step 2: rank 2 3, the others 2"),
    "one made none": ([[[7, 0]], [[7, 1]], [[7, 1]]], "step 7: rank 0 0, the others 1"),
}


@pytest.mark.parametrize("case", PASSES)
def test_ranks_that_summed_other_numbers_of_passes_are_named(case: str) -> None:
    """With the first step in which they did; equal numbers are no difference."""
    passes, said = PASSES[case]
    own, found = sketched({})
    reports = [{**found, "passes": each} for each in passes]
    with pytest.raises(ReplicasDifferError, match=said):
        Comparison().check(own, reports)
    Comparison().check(own, [reports[0]] * 3)


def test_states_are_asked_for_only_when_it_is_due() -> None:
    """A `state_dict` may take long, and not every save needs it."""
    found = sketch({"own": Tracked(1)}, asks_states=False)
    assert (found.non_tensors, found.tensors) == ({}, {})
