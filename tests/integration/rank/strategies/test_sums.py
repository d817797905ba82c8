"""A step on gradients that the ranks never summed is refused, and passes are counted."""

import gc
import logging
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from prefect_torch_ddp import RankContext
from prefect_torch_ddp.checkpoint.manifest import list_manifests
from prefect_torch_ddp.rank.strategies import sums
from tests.support.ranks import config_for, train_on

pytestmark = pytest.mark.timeout(120)

loss_of = nn.functional.mse_loss


def make(*, frozen: bool = False) -> nn.Sequential:
    """Make a model, the same on every rank, whose first layer may be frozen."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    net[0].requires_grad_(not frozen)
    return net


def data(num_samples: int = 16) -> TensorDataset:
    """Return samples, and what is to be learnt of them."""
    x = torch.linspace(-1, 1, 4 * num_samples).reshape(num_samples, 4)
    return TensorDataset(x, x.sum(1, keepdim=True))


def dropped(ctx: RankContext) -> None:
    """Drop the result of ctx.wrap."""
    net = make()
    ctx.wrap(net)
    train(ctx, net, torch.optim.SGD(net.parameters(), 0.1))


def module_called(ctx: RankContext, **options: Any) -> None:
    """Call `.module` of what ctx.wrap returned."""
    wrapped = ctx.wrap(make())
    optimizer = torch.optim.AdamW(wrapped.parameters(), 0.1, **options)
    train(ctx, wrapped.module, optimizer)  # type: ignore[arg-type]


def module_called_later(ctx: RankContext) -> None:
    """The same from step 3 on."""
    wrapped: Any = ctx.wrap(make())
    ctx.track(model=wrapped.module)
    optimizer = torch.optim.SGD(wrapped.parameters(), 0.1)
    for x, y in ctx.steps(ctx.loader(data(), global_batch_size=4), epochs=1):
        optimizer.zero_grad()
        loss_of((wrapped if ctx.step < 3 else wrapped.module)(x), y).backward()
        optimizer.step()


def module_in_micro_batches(ctx: RankContext) -> None:
    """The same in micro-batches."""
    wrapped = ctx.wrap(make())
    optimizer = torch.optim.SGD(wrapped.parameters(), 0.1)
    for batch in ctx.steps(ctx.loader(data(), global_batch_size=8), epochs=1):
        for (x, y), weight in ctx.micro_batches(batch, max_samples=2):
            (loss_of(wrapped.module(x), y) * weight).backward()  # type: ignore[operator]
        optimizer.step()


def module_in_closures(ctx: RankContext) -> None:
    """The same in a step that makes passes."""
    wrapped = ctx.wrap(make())
    optimizer = torch.optim.LBFGS(wrapped.parameters(), 0.1, max_iter=3)
    step_with_closures(ctx, wrapped.module, optimizer)  # type: ignore[arg-type]


def unfrozen(ctx: RankContext) -> None:
    """Train a layer in step 3 that was frozen when the model was wrapped."""
    net = make(frozen=True)
    model = ctx.wrap(net)
    train(ctx, model, torch.optim.SGD(net.parameters(), 0.1), partial(unfreeze_at, net, 3))


def unfrozen_with_a_group(ctx: RankContext) -> None:
    """The same with a parameter group that is added then."""
    net = make(frozen=True)
    model, optimizer = ctx.wrap(net), torch.optim.SGD(net[2].parameters(), 0.1)

    def begin(step: int) -> None:
        unfreeze_at(net, 3, step)
        if step == 3:
            optimizer.add_param_group({"params": net[0].parameters()})

    train(ctx, model, optimizer, begin)


def all_frozen(ctx: RankContext) -> None:
    """Train a model of which all was frozen when it was wrapped."""
    net = make().requires_grad_(requires_grad=False)
    model = ctx.wrap(net)
    net.requires_grad_()
    train(ctx, model, torch.optim.SGD(net.parameters(), 0.1))


def two_passes(ctx: RankContext) -> None:
    """Make two backward passes of one forward pass in step 3."""
    net = make()
    model = ctx.wrap(net)
    ctx.track(model=net)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for x, y in ctx.steps(ctx.loader(data(), global_batch_size=4), epochs=1):
        optimizer.zero_grad()
        loss = loss_of(model(x), y)
        if ctx.step == 3:
            loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()


def unfreeze_at(net: nn.Sequential, when: int, step: int) -> None:
    """Unfreeze the first layer in a step."""
    if step == when:
        net.requires_grad_()


def step_with_closures(
    ctx: RankContext, model: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """Train by an optimizer that makes passes in its step."""
    for x, y in ctx.steps(ctx.loader(data(), global_batch_size=4), epochs=1):

        def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model(x), y)
            loss.backward()
            return loss.detach() * 0 + 1  # LBFGS asks it when to stop: the same on every rank

        optimizer.step(closure)  # type: ignore[arg-type]


def train(
    ctx: RankContext,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    begin: Callable[[int], Any] = lambda _step: None,
) -> None:
    """Train."""
    for x, y in ctx.steps(ctx.loader(data(), global_batch_size=4), epochs=1):
        begin(ctx.step)
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()


def step_of_error(
    ctx: RankContext, fn: Callable[[RankContext], None]
) -> tuple[int, str, list[str]]:
    """Return in which step it failed and how, and what it was warned of; on every rank."""
    warned: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warned.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(sums.__name__).addHandler(handler)
    try:
        fn(ctx)
    except Exception as error:  # noqa: BLE001 - the test shows it
        return ctx.step, str(error), warned
    return ctx.step, "nothing", warned


BYPASSED = "no backward pass went through what ctx.wrap returned for this Sequential"
UNFROZEN = "it wasn't a parameter to train when this Sequential was given to ctx.wrap"
TWICE = "to which this rank has added a backward pass that the ranks didn't sum"
UNSUMMED = {
    "the result of wrap dropped": (dropped, 1, BYPASSED),
    ".module called": (module_called, 1, BYPASSED),
    ".module called, a fused optimizer": (partial(module_called, fused=True), 1, BYPASSED),
    ".module called in micro-batches": (module_in_micro_batches, 1, BYPASSED),
    ".module called in a closure": (module_in_closures, 1, BYPASSED),
    "a layer unfrozen after wrap": (unfrozen, 3, UNFROZEN),
    "a group unfrozen after wrap": (unfrozen_with_a_group, 3, UNFROZEN),
    "all frozen at wrap": (all_frozen, 1, UNFROZEN),
}


@pytest.mark.parametrize("how", UNSUMMED)
def test_a_step_on_gradients_that_no_rank_summed_is_refused(tmp_path: Path, how: str) -> None:
    """Every rank raises in that step, with the parameter's name and the way out."""
    fn, step, expected = UNSUMMED[how]
    for found, said, _ in train_on(2, config_for(tmp_path), step_of_error, fn):
        assert expected in said
        assert found == step
        assert said.startswith("an optimizer is about to step on the gradient of ")


@pytest.mark.parametrize("num_samples", [15, 13], ids=["2 and 1 samples", "1 and none"])
def test_steps_of_unequal_shares_are_not_accumulated(tmp_path: Path, num_samples: int) -> None:
    """The first step's gradients would count by the shares of the second, a smaller batch."""
    fn = partial(accumulated, num_samples=num_samples)
    for step, said, _ in train_on(2, config_for(tmp_path), step_of_error, fn):
        assert said.startswith("gradients of an earlier step, made within no_sync, would be")
        assert step == 4


def penalty_after(ctx: RankContext) -> None:
    """Add a penalty on the weights by a second backward pass in each step."""
    net = make()
    model, optimizer = ctx.wrap(net), torch.optim.SGD(net.parameters(), 0.1)
    ctx.track(model=net, optimizer=optimizer)
    for x, y in ctx.steps(ctx.loader(data(), global_batch_size=4), epochs=1):
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        (0.1 * sum(each.square().sum() for each in net.parameters())).backward()  # type: ignore[union-attr]
        optimizer.step()


def test_a_second_backward_pass_is_warned_of_once(tmp_path: Path) -> None:
    """A pass that all ranks make in the same way, such as a penalty, ends as under DDP."""
    config = config_for(tmp_path)
    for step, said, warned in train_on(2, config, step_of_error, penalty_after):
        assert (step, said) == (4, "nothing")
        assert [TWICE in each for each in warned] == [True]
        assert "call backward on the sum of the losses, with penalties" in warned[0]
    assert [each.step for each in list_manifests(config.storage, "run")][-1] == 4


def write_warnings(ctx: RankContext, fn: Callable[[RankContext], None], folder: Path) -> None:
    """Write down what a rank was warned of: its checkpoint fails later, when it ends."""
    _, said, warned = step_of_error(ctx, fn)
    (folder / f"warned-{ctx.rank}").write_text("\n".join([*warned, said]))


@pytest.mark.parametrize("fn", [two_passes, module_called_later], ids=lambda fn: fn.__name__)
def test_a_pass_that_makes_replicas_differ_is_left_to_their_comparison(
    tmp_path: Path, fn: Callable[[RankContext], None]
) -> None:
    """The step warns, and the next checkpoint names the difference and isn't written."""
    config = config_for(tmp_path, every_steps=4)
    with pytest.raises(AssertionError, match="the replicas of 'model' have drifted apart"):
        train_on(2, config, write_warnings, fn, tmp_path)
    for rank in range(2):
        warned, _ = (tmp_path / f"warned-{rank}").read_text().splitlines()
        assert TWICE in warned
    assert list_manifests(config.storage, "run") == []


def wrapped_again(ctx: RankContext) -> None:
    """Unfreeze a layer and wrap the model again, while the first result is still held."""
    net = make(frozen=True)
    held = [ctx.wrap(net)]
    net.requires_grad_()
    for _ in range(2):
        held.append(ctx.wrap(net))
        train(ctx, held[-1], torch.optim.SGD(net.parameters(), 0.1))


def within_another(ctx: RankContext) -> None:
    """Wrap a model, then one that holds it and a part more, and train that."""
    net = make()
    inner = ctx.wrap(net)
    outer = ctx.wrap(nn.Sequential(net, nn.Linear(1, 1)))
    train(ctx, outer, torch.optim.SGD(outer.parameters(), 0.1))
    assert inner is not outer


def adversaries(ctx: RankContext) -> None:
    """Train a generator through a discriminator, called past its wrapper, and that in turn."""
    generator, critic = make(), make()
    critic[0] = nn.Linear(1, 4)
    model, judge = ctx.wrap(generator), ctx.wrap(critic)
    first = torch.optim.Adam(generator.parameters())
    second = torch.optim.Adam(critic.parameters())
    for x, y in ctx.steps(ctx.loader(data(), global_batch_size=4), epochs=2):
        first.zero_grad()
        critic(model(x)).sum().backward()
        first.step()
        if ctx.step > 2:
            second.zero_grad()
            (judge(y) - judge(generator(x).detach())).sum().backward()
            second.step()


def accumulated(ctx: RankContext, num_samples: int = 16) -> None:
    """Add up the gradients of two steps, the first of them not summed."""
    model = ctx.wrap(make())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for x, y in ctx.steps(ctx.loader(data(num_samples), global_batch_size=4), epochs=1):
        is_odd = ctx.step % 2 == 1
        with model.no_sync() if is_odd else nullcontext():  # type: ignore[operator]
            loss_of(model(x), y).backward()
        if not is_odd:
            optimizer.step()
            optimizer.zero_grad()


def averaged_by_hand(ctx: RankContext, num_summed: int = 0) -> None:
    """Step without sums, or after some with sums, and average the weights (local SGD)."""
    model = ctx.wrap(make())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for x, y in ctx.steps(ctx.loader(data(), global_batch_size=4), epochs=1):
        is_summed = ctx.step <= num_summed
        with nullcontext() if is_summed else model.no_sync():  # type: ignore[operator]
            optimizer.zero_grad()
            loss_of(model(x), y).backward()
        optimizer.step()
        for each in model.parameters():
            torch.distributed.all_reduce(each.detach())
            each.data.div_(ctx.world_size)


def sum_by_hand(ctx: RankContext, parameters: Iterable[torch.Tensor]) -> None:
    """Average gradients over the ranks."""
    for each in parameters:
        if each.grad is not None:
            torch.distributed.all_reduce(each.grad)
            each.grad.div_(ctx.world_size)


def summed_by_hand(ctx: RankContext, *, backward_outside: bool = False) -> None:
    """Sum gradients after `no_sync`, in which only the forward pass is needed, unfrozen too."""
    net = make(frozen=True)
    model, optimizer = ctx.wrap(net), torch.optim.SGD(net.parameters(), 0.1)
    net.requires_grad_()
    for x, y in ctx.steps(ctx.loader(data(), global_batch_size=4), epochs=1):
        optimizer.zero_grad()
        with model.no_sync():  # type: ignore[operator]
            loss = loss_of(model(x), y)
            if not backward_outside:
                loss.backward()
        if backward_outside:
            loss.backward()
        sum_by_hand(ctx, net.parameters())
        optimizer.step()


def unsynced_by_attribute(ctx: RankContext) -> None:
    """Switch sums off by the attribute that `no_sync` sets, and sum by hand."""
    model: Any = ctx.wrap(make())
    model.require_backward_grad_sync = False
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for x, y in ctx.steps(ctx.loader(data(), global_batch_size=4), epochs=1):
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        sum_by_hand(ctx, model.parameters())
        optimizer.step()


def unsynced_within_another(ctx: RankContext) -> None:
    """Wrap a model, and one that holds it, which is trained within `no_sync`."""
    inner = ctx.wrap(net := make())
    outer = ctx.wrap(nn.Sequential(net, nn.Linear(1, 1)))
    optimizer = torch.optim.SGD(outer.parameters(), 0.1)
    for x, y in ctx.steps(ctx.loader(data(), global_batch_size=4), epochs=1):
        optimizer.zero_grad()
        with outer.no_sync():  # type: ignore[operator]
            loss_of(outer(x), y).backward()
        sum_by_hand(ctx, outer.parameters())
        optimizer.step()
    assert inner is not outer


def gradients_set(ctx: RankContext) -> None:
    """Compute gradients past the wrapped model, as of a second order, and set and sum them."""
    net = make()
    model, optimizer = ctx.wrap(net), torch.optim.SGD(net.parameters(), 0.1)
    parameters = list(net.parameters())
    for x, y in ctx.steps(ctx.loader(data(), global_batch_size=4), epochs=1):
        first = torch.autograd.grad(loss_of(net(x), y), parameters, create_graph=True)
        weights = [each - 0.1 * by for each, by in zip(parameters, first, strict=True)]
        named = dict(zip(dict(net.named_parameters()), weights, strict=True))
        second = torch.autograd.grad(
            loss_of(torch.func.functional_call(net, named, x), y), parameters
        )
        for each, by in zip(parameters, second, strict=True):
            each.grad = by
        sum_by_hand(ctx, parameters)
        optimizer.step()
    assert model is not net


def never_wrapped(ctx: RankContext) -> None:
    """Train a wrapped model, and another one whose gradients are summed by hand."""
    model, other = ctx.wrap(make()), make()
    optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], 0.1)
    for x, y in ctx.steps(ctx.loader(data(), global_batch_size=4), epochs=1):
        optimizer.zero_grad()
        (loss_of(model(x), y) + loss_of(other(x), y)).backward()
        sum_by_hand(ctx, other.parameters())
        optimizer.step()


def scaled_and_clipped(ctx: RankContext) -> None:
    """Scale the loss, and clip the gradients that two optimizers step on."""
    net = make()
    model, scaler = ctx.wrap(net), torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizers = [torch.optim.Adam(net[0].parameters()), torch.optim.SGD(net[2].parameters(), 0.1)]
    for x, y in ctx.steps(ctx.loader(data(), global_batch_size=4), epochs=1):
        scaler.scale(loss_of(model(x), y)).backward()
        for each in optimizers:
            scaler.unscale_(each)
        nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        for each in optimizers:
            scaler.step(each)
            each.zero_grad()
        scaler.update()


def frozen_again(ctx: RankContext) -> None:
    """Freeze a layer and wrap the model again; its gradient is set to zeros from then on."""
    net = make()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for is_frozen in (False, True):
        net[0].requires_grad_(not is_frozen)
        model = ctx.wrap(net)
        for x, y in ctx.steps(ctx.loader(data(), global_batch_size=4), epochs=1 + is_frozen):
            optimizer.zero_grad(set_to_none=False)
            loss_of(model(x), y).backward()
            optimizer.step()


def steps_in_hooks(ctx: RankContext) -> None:
    """Sum and step within the backward pass, as soon as there is a gradient."""
    net = make()

    def hook(parameter: torch.Tensor) -> None:
        sum_by_hand(ctx, [parameter])
        optimizers[parameter].step()
        parameter.grad = None

    model: Any = ctx.wrap(net)
    optimizers = {each: torch.optim.SGD([each], 0.1) for each in net.parameters()}
    for each in net.parameters():
        each.register_post_accumulate_grad_hook(hook)
    for x, y in ctx.steps(ctx.loader(data(), global_batch_size=4), epochs=1):
        with model.no_sync():
            loss_of(model(x), y).backward()


def penalty_unsynced(ctx: RankContext) -> None:
    """Add a penalty on the weights by a second backward pass within `no_sync`, or before."""
    net = make()
    model, optimizer = ctx.wrap(net), torch.optim.SGD(net.parameters(), 0.1)
    for x, y in ctx.steps(ctx.loader(data(), global_batch_size=4), epochs=1):
        optimizer.zero_grad()
        (0.1 * sum(each.square().sum() for each in net.parameters())).backward()  # type: ignore[union-attr]
        loss_of(model(x), y).backward()
        with model.no_sync():  # type: ignore[operator]
            (0.1 * sum(each.abs().sum() for each in net.parameters())).backward()  # type: ignore[union-attr]
        optimizer.step()


def trained_on_alone(ctx: RankContext) -> None:
    """Train the model on by itself, when the wrapped one is gone."""
    net = make()
    train(ctx, ctx.wrap(net), torch.optim.SGD(net.parameters(), 0.1))
    gc.collect()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(2):
        optimizer.zero_grad()
        net(torch.ones(2, 4)).sum().backward()
        optimizer.step()


def sharpness(ctx: RankContext) -> None:
    """Climb by each rank's own gradient, then step by the sum of another pass (SAM)."""
    net = make()
    model, optimizer = ctx.wrap(net), torch.optim.SGD(net.parameters(), 0.1)
    for x, y in ctx.steps(ctx.loader(data(), global_batch_size=4), epochs=1):
        with model.no_sync():  # type: ignore[operator]
            loss_of(model(x), y).backward()
        climbs = [each.grad.clone() for each in net.parameters() if each.grad is not None]
        with torch.no_grad():
            torch._foreach_add_(list(net.parameters()), climbs, alpha=0.1)
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        with torch.no_grad():
            torch._foreach_sub_(list(net.parameters()), climbs, alpha=0.1)
        optimizer.step()
        optimizer.zero_grad()


def checkpointed(ctx: RankContext) -> None:
    """Compute layers again in the backward pass; one isn't used at all."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.unused, self.net = nn.Linear(1, 1), make()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.net, x, use_reentrant=False)  # type: ignore[no-any-return]

    model = ctx.wrap(Net(), find_unused_parameters=True)
    train(ctx, model, torch.optim.AdamW(model.parameters()))


def looked_at(ctx: RankContext) -> None:
    """Look at gradients of the model itself before the training and after steps."""
    net = make()
    model = ctx.wrap(net)
    loss_of(net(torch.ones(2, 4)), torch.ones(2, 1)).backward()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for x, y in ctx.steps(ctx.loader(data(), global_batch_size=4), epochs=1):
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()
        loss_of(net(x), y).backward()


def two_losses(ctx: RankContext) -> None:
    """Two forward and backward passes a step, and a pass of which only half is reached."""
    model = ctx.wrap(make(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for x, y in ctx.steps(ctx.loader(data(), global_batch_size=4), epochs=1):
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        (loss_of(model(x), y) * 0.5).backward()
        optimizer.step()


def a_local_probe(ctx: RankContext) -> None:
    """A small model that each rank trains by itself, in addition to the wrapped one."""
    model, probe = ctx.wrap(make()), nn.Linear(1, 1)
    optimizer = torch.optim.SGD([*model.parameters(), *probe.parameters()], 0.1)
    for x, y in ctx.steps(ctx.loader(data(), global_batch_size=4), epochs=1):
        optimizer.zero_grad()
        out = model(x)
        (loss_of(out, y) + loss_of(probe(out.detach()), y)).backward()
        optimizer.step()


def compiled(ctx: RankContext) -> None:
    """A compiled model."""
    net = make()
    model = torch.compile(ctx.wrap(net), backend="eager")
    train(ctx, model, torch.optim.SGD(net.parameters(), 0.1))


def frozen_all_along(ctx: RankContext) -> None:
    """A frozen layer, whose parameters the optimizer has."""
    net = make(frozen=True)
    train(ctx, ctx.wrap(net), torch.optim.SGD(net.parameters(), 0.1))


def joined(ctx: RankContext) -> None:
    """Make different numbers of passes within DDP's join, in a loop without ctx.steps."""
    model = ctx.wrap(make())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x, y = data().tensors
    with model.join():  # type: ignore[operator]
        for i in range(3 + ctx.rank):
            optimizer.zero_grad()
            loss_of(model(x[i : i + 2]), y[i : i + 2]).backward()
            optimizer.step()


def sparse(ctx: RankContext) -> None:
    """A model of which some gradients, or all of them, are sparse."""
    for net in (
        nn.Sequential(nn.Embedding(16, 4, sparse=True), nn.Linear(4, 1)),
        nn.Sequential(nn.Embedding(16, 1, sparse=True)),
    ):
        model = ctx.wrap(net)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        samples = TensorDataset(torch.arange(16), torch.ones(16, 1))
        for x, y in ctx.steps(ctx.loader(samples, global_batch_size=4), epochs=1):
            optimizer.zero_grad()
            loss_of(model(x), y).backward()
            optimizer.step()


def ignored(ctx: RankContext) -> None:
    """Have DDP ignore a model's first parameter, and sum its gradient by hand."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(16, 4), nn.Linear(4, 1))
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(  # type: ignore[no-untyped-call]
        net, ["0.weight"]
    )
    model, optimizer = ctx.wrap(net), torch.optim.SGD(net.parameters(), 0.1)
    samples = TensorDataset(torch.arange(16), torch.ones(16, 1))
    for x, y in ctx.steps(ctx.loader(samples, global_batch_size=4), epochs=1):
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        sum_by_hand(ctx, net[0].parameters())
        optimizer.step()


def static_graph(ctx: RankContext) -> None:
    """A static graph, in which a layer is checkpointed and used twice."""
    net = make()

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first = checkpoint(net[0], x.requires_grad_(), use_reentrant=True)
            return net(checkpoint(net[0], first, use_reentrant=True))

    model = ctx.wrap(Twice(), static_graph=True)
    train(ctx, model, torch.optim.SGD(net.parameters(), 0.1))


def compiled_step(ctx: RankContext) -> None:
    """A compiled step of the optimizer."""
    net = make()
    model, optimizer = ctx.wrap(net), torch.optim.SGD(net.parameters(), 0.1)
    step = torch.compile(optimizer.step, backend="eager")
    for x, y in ctx.steps(ctx.loader(data(), global_batch_size=4), epochs=1):
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        step()


def closures(ctx: RankContext) -> None:
    """An optimizer that makes passes in its step, after one of the model itself."""
    net = make()
    model, optimizer = ctx.wrap(net), torch.optim.LBFGS(net.parameters(), 0.1, max_iter=3)
    loss_of(net(torch.ones(2, 4)), torch.ones(2, 1)).backward()
    step_with_closures(ctx, model, optimizer)


def penalty(ctx: RankContext) -> None:
    """A penalty on the gradient of the loss by the inputs."""
    model = ctx.wrap(make())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for x, y in ctx.steps(ctx.loader(data(), global_batch_size=4), epochs=1):
        optimizer.zero_grad()
        loss = loss_of(model(x.requires_grad_()), y)
        (by_inputs,) = torch.autograd.grad(loss, x, create_graph=True)
        (loss + by_inputs.square().sum()).backward()
        optimizer.step()


HEALTHY = (
    joined,
    sparse,
    ignored,
    static_graph,
    compiled_step,
    closures,
    penalty,
    wrapped_again,
    within_another,
    adversaries,
    accumulated,
    averaged_by_hand,
    partial(averaged_by_hand, num_summed=1),
    summed_by_hand,
    partial(summed_by_hand, backward_outside=True),
    unsynced_by_attribute,
    unsynced_within_another,
    gradients_set,
    never_wrapped,
    scaled_and_clipped,
    frozen_again,
    steps_in_hooks,
    penalty_unsynced,
    trained_on_alone,
    sharpness,
    checkpointed,
    looked_at,
    two_losses,
    a_local_probe,
    compiled,
    frozen_all_along,
)


def named(fn: Any) -> str:
    """Return a case's id."""
    if not isinstance(fn, partial):
        return fn.__name__.replace("_", " ")  # type: ignore[no-any-return]
    return f"{named(fn.func)}, {' '.join(fn.keywords).replace('_', ' ')}"


@pytest.mark.parametrize("fn", HEALTHY, ids=named)
def test_steps_on_what_is_summed_or_meant_are_let_alone(
    tmp_path: Path, fn: Callable[[RankContext], None]
) -> None:
    """Calls of other models cause no warning."""
    for _, said, warned in train_on(2, config_for(tmp_path), step_of_error, fn):
        assert (said, warned) == ("nothing", [])


def leave_out(ctx: RankContext, left_out: dict[int, int]) -> list[float]:
    """Leave a batch out on each rank, in different steps, as for a loss that isn't finite."""
    net = make()
    model, optimizer = ctx.wrap(net), torch.optim.SGD(net.parameters(), 0.1)
    ctx.track(model=net, optimizer=optimizer)
    for x, y in ctx.steps(ctx.loader(data(), global_batch_size=4), epochs=2):
        if left_out.get(ctx.rank) == ctx.step:
            continue
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()
    return [each.sum().item() for each in net.parameters()]


def test_ranks_that_leave_out_different_batches_are_named(tmp_path: Path) -> None:
    """Equal weights from sums over different batches aren't saved."""
    config = config_for(tmp_path, every_steps=4)
    said = r"numbers of backward passes in step 2: rank 1 0, the others 1\. .* all_reduce of a flag"
    with pytest.raises(AssertionError, match=said):
        train_on(2, config, leave_out, {0: 3, 1: 2})
    assert list_manifests(config.storage, "run") == []


def test_a_batch_that_all_ranks_leave_out_is_no_difference(tmp_path: Path) -> None:
    """A number of passes that changes from step to step is no difference either."""
    config = config_for(tmp_path)
    first, second = train_on(2, config, leave_out, {0: 2, 1: 2})
    assert first == second
    assert [each.step for each in list_manifests(config.storage, "run")][-1] == 8
