"""States are copied, serialised and read back as they were; what could not be is refused."""

import collections
import random
import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from prefect_torch_ddp.checkpoint.state import objects
from prefect_torch_ddp.checkpoint.state.objects import check_loadable
from prefect_torch_ddp.checkpoint.state.serial import (
    Serializer,
    Staging,
    capture_generators,
    changed_options,
    from_bytes,
    group_options,
    load_state,
    put_options,
    restore_generators,
    state_of,
    to_bytes,
)
from prefect_torch_ddp.errors import InvalidParamsError


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


def test_views_that_conjugate_or_negate_are_no_ties() -> None:
    """They have the memory of their base, but other values."""
    base = torch.tensor([1 + 2j])
    copied = Staging().copy([base, base.conj(), base.imag, base.conj().imag, base])
    values = [each.tolist() for each in copied]
    assert values == [[1 + 2j], [1 - 2j], [2], [-2], [1 + 2j]]
    assert copied[0] is copied[4]


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
    """Larger, smaller and equal ones after each other are as with a plain torch.save, in the
    same place."""

    def read(view: memoryview) -> Any:
        return from_bytes(bytes(view))

    serializer = Serializer()
    small, large = {"x": torch.arange(5.0)}, {"y": torch.randn(300, 1000), "names": ["a"] * 9}
    first = bytes(serializer.to_view(large))
    memory = serializer._memory
    for _ in range(2):
        assert read(serializer.to_view(small))["x"].tolist() == [0, 1, 2, 3, 4]
        assert read(serializer.to_view({})) == {}
        assert serializer.to_view(large) == first
        assert serializer._memory is memory
    assert torch.equal(read(memoryview(first))["y"], large["y"])
    held = serializer.to_view(large)
    assert held.readonly
    assert read(serializer.to_view(small))["x"].tolist() == [0, 1, 2, 3, 4]
    assert held == first, "a view that is still held keeps its content"
    assert torch.serialization.get_crc32_options(), "whoever else saves has zip's checksums"


@pytest.mark.parametrize(
    ("part", "says"),
    [
        (collections.defaultdict(lambda: 0), "is a collections.defaultdict"),
        (np.zeros(2), "is a numpy.ndarray"),
        (threading.Lock(), "is a _thread.lock"),
        (ValueError("late"), "is a builtins.ValueError"),
        (np.longdouble(2), "is a numpy.longdouble"),
        (np.datetime64("2020-01-01", "ns"), "is a numpy.datetime64"),
        ({1: 2, np.datetime64(3, "s"): 4}, "has a key that is a numpy.datetime64"),
    ],
)
def test_what_cannot_be_read_back_is_named_with_its_place(part: Any, says: str) -> None:
    """Before it is written; torch's own advice would be to load unsafely."""
    says = rf"object 'meter' can't be read back .*\['groups'\]\[1\]\['x'\] {says};"
    with pytest.raises(InvalidParamsError, match=says):
        check_loadable("meter", {"groups": [{}, {"x": part}], "lr": 0.1})


def test_numbers_of_numpy_become_pythons() -> None:
    """As in `AdamW(lr=np.logspace(...)[i])` and `CosineAnnealingLR(T_max=np.int64(...))`, also
    as keys and in sets; the order of keys stays."""
    state = {
        "lr": np.float64(0.5),
        "groups": [(np.int64(3), np.bool_(1)), np.float32(2), {np.str_("a")}],
        "counts": collections.OrderedDict({np.int64(2): np.uint8(5), (np.int32(1), 0): 6, 3: 7}),
    }
    check_loadable("optimizer", state)
    copied = Staging().copy(state)
    read = from_bytes(to_bytes(copied))
    assert repr(read) == repr(copied)
    assert read["groups"] == [(3, True), 2.0, {"a"}]
    assert "np." not in repr(copied)
    assert [*copied["counts"].items()] == [(2, 5), ((1, 0), 6), (3, 7)]


def test_what_surely_can_be_read_back_is_not_serialised_to_see_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The check comes with every checkpoint and must cost far less than the copy."""
    net = nn.BatchNorm1d(3)
    optimizer = torch.optim.AdamW(net.parameters(), lr=np.float64(0.1))
    net(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    monkeypatch.setattr(objects, "to_bytes", None)
    check_loadable("net", net.state_dict())
    check_loadable("optimizer", optimizer.state_dict())


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


class Ema(nn.Module):
    """Holds a copy of a model, as AveragedModel does."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def net(*, compiled: bool) -> nn.Module:
    """Make a model, of which a part may be compiled, inside an average and a parametrisation."""
    first: Any = nn.utils.parametrizations.weight_norm(nn.Linear(2, 4))
    inner: Any = torch.compile(first, backend="eager") if compiled else first
    return Ema(nn.Sequential(inner, nn.BatchNorm1d(4)))


def test_a_compiled_part_is_named_as_the_plain_one() -> None:
    """In both directions, also in an averaged and a parametrised model."""
    plain, compiled = net(compiled=False), net(compiled=True)
    assert list(state_of(compiled)) == list(plain.state_dict())
    load_state(plain, state_of(compiled))
    back = net(compiled=True)
    load_state(back, state_of(plain))
    for name, value in state_of(back).items():
        assert torch.equal(value, state_of(compiled)[name])


def parameters(num: int) -> list[nn.Parameter]:
    """Make some parameters."""
    return [nn.Parameter(torch.ones(2)) for _ in range(num)]


def test_an_optimizer_of_another_kind_or_with_other_groups_is_named() -> None:
    """Not by a bare KeyError in a later step; an older torch's state, which lacks an option that
    torch fills in, is loaded."""
    (weight,) = parameters(1)
    sgd, adam = torch.optim.SGD([weight], 0.1), torch.optim.Adam([weight])
    with pytest.raises(ValueError, match=r"another kind of optimizer's: group 0 has no .*betas"):
        load_state(adam, state_of(sgd))
    stepped = torch.optim.SGD(parameters(1), 0.1, momentum=0.9)
    stepped.param_groups[0]["params"][0].grad = torch.ones(2)
    stepped.step()
    with pytest.raises(ValueError, match=r"another kind of optimizer's: group 0 has no .*betas"):
        load_state(adam, state_of(stepped))  # torch itself raises KeyError: 'step'
    grown = torch.optim.SGD(parameters(1), 0.1)
    grown.add_param_group({"params": parameters(1)})
    with pytest.raises(ValueError, match="it has 2 parameter groups and the optimizer here 1"):
        load_state(sgd, state_of(grown))
    wide = torch.optim.SGD(parameters(2), 0.1)
    with pytest.raises(ValueError, match=r"group 0 has 2 parameters .* here 1: .* lr=0"):
        load_state(sgd, state_of(wide))
    tagged = torch.optim.SGD([{"params": [weight], "name": "head"}], 0.1)
    torch.optim.lr_scheduler.OneCycleLR(tagged, 1.0, total_steps=9)
    sgd.param_groups[0]["momentum"] = 0.5
    load_state(tagged, state_of(sgd))  # a run that had neither the name nor a scheduler
    (group,) = tagged.param_groups
    assert (group["name"], group["max_lr"], group["lr"], group["momentum"]) == ("head", 1, 0.1, 0.5)
    older = state_of(torch.optim.SGD([weight], 0.2))
    del older["param_groups"][0]["maximize"]
    load_state(sgd, older)
    assert sgd.param_groups[0]["lr"] == 0.2


class OwnGroups(torch.optim.Optimizer):
    """An optimizer of no defaults, whose groups have all options, as some Muons are."""

    def __init__(self, weight: nn.Parameter, **options: object) -> None:
        super().__init__([{"params": [weight], **options}], {})


def test_an_optimizer_without_defaults_is_resumed_with_a_new_scheduler() -> None:
    """Which of its options are those of its kind isn't known: more of them are no other kind."""
    (weight,) = parameters(1)
    state = state_of(OwnGroups(weight, lr=0.2, use_muon=True))
    own = OwnGroups(weight, lr=0.1, use_muon=True, name="head")
    torch.optim.lr_scheduler.LambdaLR(own, lambda _: 1.0)
    load_state(own, state)
    (group,) = own.param_groups
    assert (group["lr"], group["initial_lr"], group["name"]) == (0.2, 0.1, "head")
    with pytest.raises(ValueError, match=r"another kind of optimizer's: group 0 has no use_muon"):
        load_state(OwnGroups(weight, lr=0.1, use_muon=True), state_of(torch.optim.SGD([weight])))


class Stateful(OwnGroups):
    """One that looks into its state when it is loaded, as torch's Adam does."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for kept in self.state.values():
            kept["own"] = kept["own"]


def test_the_state_of_another_kind_is_named_by_an_optimizer_without_defaults() -> None:
    """Not by a KeyError of the kind that looks for its own."""
    stepped = torch.optim.SGD(parameters(1), 0.1, momentum=0.9)
    stepped.param_groups[0]["params"][0].grad = torch.ones(2)
    stepped.step()
    with pytest.raises(ValueError, match=r"another kind of optimizer's: group 0 has no use_muon"):
        load_state(Stateful(*parameters(1), lr=0.1, use_muon=True), state_of(stepped))


@pytest.mark.parametrize(
    ("value", "other"),
    [
        (np.ones(2), np.zeros(2)),
        ([torch.ones(2)], [torch.zeros(2)]),
        ([torch.ones(2)], [torch.ones(2)] * 2),
        (torch.ones(2), None),
        (None, torch.ones(2)),
        (torch.tensor(1), 2),
        (torch.tensor(0.5), 0.25),
        ((0.9, 0.99), (0.9, 0.999)),
        (True, "fused"),
    ],
)
def test_any_option_of_a_group_can_be_compared_and_set(value: Any, other: Any) -> None:
    """Arrays and lists of tensors too, which have no truth value."""
    optimizer = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1)
    (group,) = optimizer.param_groups
    group["own"] = value
    before = group_options(optimizer)
    assert changed_options(optimizer, before) == [{}]
    assert put_options(optimizer, before) == []
    group["own"] = other
    assert [{*each} for each in changed_options(optimizer, before)] == [{"own"}]
    assert put_options(optimizer, before) == ["own"]
    assert changed_options(optimizer, before) == [{}]
