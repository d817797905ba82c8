"""A step on gradients that the ranks haven't summed is refused in that step; passes are counted."""

from collections.abc import Callable
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
from tests.support.ranks import config_for, train_on

pytestmark = pytest.mark.timeout(120)

loss_of = nn.functional.mse_loss


def make(*, frozen: bool = False) -> nn.Sequential:
    """Make a model, the same on every rank, whose first layer may be frozen."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    net[0].requires_grad_(not frozen)
    return net


def data() -> TensorDataset:
    """Return sixteen samples, and what is to be learnt of them."""
    x = torch.linspace(-1, 1, 64).reshape(16, 4)
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
    model = ctx.wrap(make())
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


def step_of_error(ctx: RankContext, fn: Callable[[RankContext], None]) -> tuple[int, str]:
    """Return in which step it failed and how; on every rank, since none waits for another."""
    try:
        fn(ctx)
    except Exception as error:  # noqa: BLE001 - the test shows it
        return ctx.step, str(error)
    return ctx.step, "nothing"


BYPASSED = "no backward pass went through what ctx.wrap returned for this Sequential"
UNFROZEN = "it wasn't trainable when this Sequential was given to ctx.wrap"
TWICE = "to which this rank has added a backward pass that the ranks didn't sum"
UNSUMMED = {
    "the result of wrap dropped": (dropped, 1, BYPASSED),
    ".module called": (module_called, 1, BYPASSED),
    ".module called later": (module_called_later, 3, TWICE),
    ".module called, a fused optimizer": (partial(module_called, fused=True), 1, BYPASSED),
    ".module called in micro-batches": (module_in_micro_batches, 1, BYPASSED),
    "a layer unfrozen after wrap": (unfrozen, 3, UNFROZEN),
    "a group unfrozen after wrap": (unfrozen_with_a_group, 3, UNFROZEN),
    "all frozen at wrap": (all_frozen, 1, UNFROZEN),
    "two backward passes of one forward": (two_passes, 3, TWICE),
}


@pytest.mark.parametrize("how", UNSUMMED)
def test_a_step_on_gradients_that_no_rank_summed_is_refused(tmp_path: Path, how: str) -> None:
    """In that very step, on every rank, with the parameter's name and the way out."""
    fn, step, expected = UNSUMMED[how]
    for found, said in train_on(2, config_for(tmp_path), step_of_error, fn):
        assert expected in said
        assert found == step
        assert said.startswith("an optimizer is about to step on the gradient of ")


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


def accumulated(ctx: RankContext) -> None:
    """Add up the gradients of two steps, the first of them not summed."""
    model = ctx.wrap(make())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for x, y in ctx.steps(ctx.loader(data(), global_batch_size=4), epochs=1):
        is_odd = ctx.step % 2 == 1
        with model.no_sync() if is_odd else nullcontext():  # type: ignore[operator]
            loss_of(model(x), y).backward()
        if not is_odd:
            optimizer.step()
            optimizer.zero_grad()


def averaged_by_hand(ctx: RankContext) -> None:
    """Step without sums, and average the weights every other step (local SGD)."""
    model = ctx.wrap(make())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for x, y in ctx.steps(ctx.loader(data(), global_batch_size=4), epochs=1):
        is_summed = ctx.step == 1
        with nullcontext() if is_summed else model.no_sync():  # type: ignore[operator]
            optimizer.zero_grad()
            loss_of(model(x), y).backward()
        optimizer.step()
        for each in model.parameters():
            torch.distributed.all_reduce(each.detach())
            each.data.div_(ctx.world_size)


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
    """A small model that each rank trains by itself beside the wrapped one."""
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
    """An optimizer that makes passes in its step."""
    model = ctx.wrap(make())
    optimizer = torch.optim.LBFGS(model.parameters(), 0.1, max_iter=3)
    for x, y in ctx.steps(ctx.loader(data(), global_batch_size=4), epochs=1):

        def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model(x), y)
            loss.backward()
            return loss.detach() * 0 + 1  # LBFGS asks it when to stop: the same on every rank

        optimizer.step(closure)  # type: ignore[arg-type]


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
    static_graph,
    compiled_step,
    closures,
    penalty,
    wrapped_again,
    within_another,
    adversaries,
    accumulated,
    averaged_by_hand,
    looked_at,
    two_losses,
    a_local_probe,
    compiled,
    frozen_all_along,
)


@pytest.mark.parametrize("fn", HEALTHY, ids=lambda fn: fn.__name__.replace("_", " "))
def test_steps_on_what_is_summed_or_meant_are_let_alone(
    tmp_path: Path, fn: Callable[[RankContext], None]
) -> None:
    """Whatever is called beside the wrapped models."""
    for _, said in train_on(2, config_for(tmp_path), step_of_error, fn):
        assert said == "nothing"


def leave_out(ctx: RankContext, left_out: dict[int, int]) -> list[float]:
    """Leave a batch out on each rank, in a step of its own, as for a loss that isn't finite."""
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
    """Their weights end up the same, of sums over different batches; nothing of that is saved."""
    config = config_for(tmp_path, every_steps=4)
    said = r"numbers of backward passes in step 2: rank 1 0, the others 1\. .* all_reduce of a flag"
    with pytest.raises(AssertionError, match=said):
        train_on(2, config, leave_out, {0: 3, 1: 2})
    assert list_manifests(config.storage, "run") == []


def test_a_batch_that_all_ranks_leave_out_is_no_difference(tmp_path: Path) -> None:
    """Nor is a number of passes that changes from step to step."""
    config = config_for(tmp_path)
    first, second = train_on(2, config, leave_out, {0: 2, 1: 2})
    assert first == second
    assert [each.step for each in list_manifests(config.storage, "run")][-1] == 8
