"""Whether optimizers step on gradients that the ranks have summed; and how many passes they sum.

Each rank sees the first by itself, without talking to others: a wrapped model's communication hook
ran, or it didn't. That doesn't prove that replicas will differ, since a gradient may be the same on
all ranks. So a step is refused only if no pass has ever summed that gradient and the user didn't
ask for that by `no_sync`: then what `ctx.wrap` returned isn't what is trained. An unsummed pass
after a summed one is only warned of, once, and a step within a backward pass isn't checked. What
differs in the end is found by the comparison of replicas at a checkpoint, which also compares how
many passes each step summed.
"""

import functools
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from prefect_torch_ddp.errors import InvalidParamsError

logger = logging.getLogger(__name__)

MOST_CHANGES = 500
"""So many changes of the number of passes are kept between two checkpoints: the first counts."""


@dataclass
class _Wrapped:
    """What a model was when it was wrapped, and what its passes were since then."""

    summed: frozenset[int]
    """The ids of the parameters that its passes sum, or that it has to ignore."""
    ddps: WeakSet[DistributedDataParallel]
    """What `ctx.wrap` returned for it, each time, and is still alive."""
    has_summed: bool = False
    is_users: bool = False
    """Whether the user called `no_sync` since its last pass that was summed."""

    @property
    def syncs(self) -> bool:
        """Whether its passes are to be summed now."""
        return not self.is_users and all(each.require_backward_grad_sync for each in self.ddps)


@dataclass
class _Suspects:
    """The parameters of an optimizer that no pass sums."""

    known: tuple[int, int] = (-1, -1)
    """The optimizer's number of parameters and the watch's of changes, as of which they hold."""
    parameters: list[torch.Tensor] = field(default_factory=list)


class SumWatch:
    """Refuses steps of optimizers on gradients that the ranks have never summed."""

    def __init__(self) -> None:
        """Watch nothing until a model is wrapped."""
        self.passes = BackwardPasses()
        self._wrapped: WeakKeyDictionary[nn.Module, _Wrapped] = WeakKeyDictionary()
        self._suspects: WeakKeyDictionary[torch.optim.Optimizer, _Suspects] = WeakKeyDictionary()
        self._num_wraps = 0
        self._left: set[int] = set()
        """The ids of parameters that got a gradient that was to be summed, and wasn't yet."""
        self._has_warned = False
        self._handles: list[Any] = []

    def take(self, model: nn.Module, ddp: DistributedDataParallel | None) -> None:
        """Watch a model from now on; without a DDP it has nothing to train yet."""
        if not self._handles:
            self._handles.append(register_optimizer_step_pre_hook(_BeforeStep(ref(self))))
        trained = [each for each in model.parameters() if each.requires_grad]
        ignored = getattr(model, "_ddp_params_and_buffers_to_ignore", ())
        left_out = [each for name, each in model.named_parameters() if name in ignored]
        before = self._wrapped.get(model)
        ddps = before.ddps if before else WeakSet()
        if ddp is not None:
            ddps.add(ddp)
            # Of a whole pass one of both gets a gradient, unless the model has several ends. What
            # DDP has to ignore, the user sums.
            ids = set(map(id, left_out))
            probed = [each for each in trained if id(each) not in ids]
            for parameter in {id(each): each for each in probed[:1] + probed[-1:]}.values():
                register: Any = parameter.register_post_accumulate_grad_hook
                self._handles.append(register(Probe(ref(self))))
        self._wrapped[model] = _Wrapped(frozenset(map(id, [*trained, *left_out])), ddps)
        self._num_wraps += 1

    def summed(self, model: nn.Module, *, counts: bool) -> None:
        """Note that a whole backward pass of a wrapped model, or of its copy, is being summed.

        It doesn't count within `join`, where ranks may make different numbers of passes.
        """
        if counts:
            self.passes.count()
        wrapped = self._wrapped.get(model)
        if wrapped is not None:
            wrapped.has_summed, wrapped.is_users = True, False
            self._left -= wrapped.summed

    def leave_to_user(self, model: nn.Module) -> None:
        """Note that the user makes passes of a model in `no_sync`, to sum or to average later."""
        wrapped = self._wrapped.get(model)
        if wrapped is not None:
            # Until its next sum: only the forward pass has to be within `no_sync`.
            wrapped.is_users = True

    def accumulated(self, parameter: torch.Tensor) -> None:
        """Note a gradient; the pass that it is of may be summed right after."""
        if all(each.syncs for each in self._holders(parameter)):
            self._left.add(id(parameter))
        else:
            self._left.discard(id(parameter))

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse, by InvalidParamsError, a step on what the ranks never sum."""
        if torch._C._current_graph_task_id() != -1:  # noqa: SLF001 - torch has no public way
            return  # in a backward pass, whose end may be to sum
        groups = optimizer.param_groups
        known = sum(len(group["params"]) for group in groups), self._num_wraps
        suspects = self._suspects.setdefault(optimizer, _Suspects())
        if suspects.known != known:
            suspects.known, suspects.parameters = known, self._suspects_in(groups)
        for parameter in suspects.parameters:
            # One that was frozen again may have kept a gradient, which zero_grad set to zeros.
            if parameter.grad is not None and parameter.requires_grad:
                self._refuse_untrained(parameter)
        if not self._left:
            return
        for parameter in (each for group in groups for each in group["params"]):
            if id(parameter) in self._left and parameter.grad is not None:
                self._judge(parameter)

    def close(self) -> None:
        """Watch nothing any more."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _holders(self, parameter: torch.Tensor) -> list[_Wrapped]:
        """Return the wrapped models whose passes sum a parameter's gradient."""
        return [each for each in self._wrapped.values() if id(parameter) in each.summed]

    def _suspects_in(self, groups: list[dict[str, Any]]) -> list[torch.Tensor]:
        """Return what belongs to a wrapped model and no pass of any will ever sum."""
        of_models = {id(each) for model in self._wrapped for each in model.parameters()}
        suspected = of_models.difference(*(each.summed for each in self._wrapped.values()))
        return [each for group in groups for each in group["params"] if id(each) in suspected]

    def _named(self, parameter: torch.Tensor) -> tuple[str, nn.Module, _Wrapped] | None:
        """Return a parameter's name, in which wrapped model."""
        for model, wrapped in self._wrapped.items():
            for name, each in model.named_parameters():
                if each is parameter:
                    return name, model, wrapped
        return None

    def _refuse_untrained(self, parameter: torch.Tensor) -> None:
        if (found := self._named(parameter)) is None or not found[2].syncs:
            return
        name, model, _ = found
        msg = (
            f"an optimizer is about to step on the gradient of {name}, which the ranks don't sum: "
            f"it wasn't a parameter to train when this {type(model).__name__} was given to "
            "ctx.wrap. Call ctx.wrap(model) again after you replace parameters or change which of "
            "them are trained, or have all of them trainable before it"
        )
        raise InvalidParamsError(msg)

    def _judge(self, parameter: torch.Tensor) -> None:
        """Refuse the step if no pass was ever summed; else warn, if something is still wrapped."""
        holders = self._holders(parameter)
        if (found := self._named(parameter)) is None or not all(each.syncs for each in holders):
            return
        name, model, _ = found
        if not any(each.has_summed for each in holders):
            msg = (
                f"an optimizer is about to step on the gradient of {name}, which no other rank has "
                f"added to: no backward pass went through what ctx.wrap returned for this "
                f"{type(model).__name__}. Call that in the forward pass, not the model given to "
                "ctx.wrap and not .module. A pass whose gradients you sum yourself, or that is the "
                "same on all ranks, belongs within its no_sync(), or before ctx.wrap"
            )
            raise InvalidParamsError(msg)
        if not self._has_warned and any(each.ddps for each in holders):
            self._has_warned = True
            text = (
                "an optimizer is about to step on the gradient of %s, to which this rank has added "
                "a backward pass that the ranks didn't sum: it came after another one of the same "
                "forward pass, or of one before the latest, or went past what ctx.wrap returned. "
                "If it isn't the same on all ranks, the replicas drift apart, and no further "
                "checkpoint is written. Make one backward pass after each forward pass: call "
                "backward on the sum of the losses, with penalties on the weights added"
            )
            logger.warning(text, name)


class Probe:
    """Notes each gradient that a parameter gets."""

    def __init__(self, watch: "ref[SumWatch]") -> None:
        """Keep the watch not alive."""
        self._watch = watch

    def __call__(self, parameter: torch.Tensor) -> None:
        """Note one."""
        watch = self._watch()
        if watch is not None:
            watch.accumulated(parameter)

    def __deepcopy__(self, _memo: Mapping[int, Any]) -> "Probe":
        """Be shared by copies of a parameter, of which nothing is noted."""
        return self


class _BeforeStep:
    """What torch calls before each step of any optimizer."""

    def __init__(self, watch: "ref[SumWatch]") -> None:
        self._watch = watch

    def __call__(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        watch = self._watch()
        if watch is None or torch.compiler.is_compiling():
            return None
        # With a closure the gradients are still to come.
        if callable(kwargs.get("closure")):
            return args, {**kwargs, "closure": self._checked(optimizer, kwargs["closure"])}
        if len(args) > 1 and callable(args[1]):  # the first is the optimizer
            return (args[0], self._checked(optimizer, args[1]), *args[2:]), kwargs
        watch.check(optimizer)
        return None

    def _checked(self, optimizer: torch.optim.Optimizer, closure: Any) -> Any:
        """Return a closure after which the gradients are checked that it made."""

        @functools.wraps(closure, updated=())
        def checked(*args: Any, **kwargs: Any) -> Any:
            value = closure(*args, **kwargs)
            if (watch := self._watch()) is not None:
                watch.check(optimizer)
            return value

        return checked


class BackwardPasses:
    """How many backward passes each step summed: the same on all ranks, or sums were mixed up."""

    def __init__(self) -> None:
        """Begin outside of a step."""
        self._step: int | None = None
        self._num = 0
        self._changes: list[tuple[int, int]] = []

    def count(self) -> None:
        """Count one."""
        self._num += 1

    def begin_step(self, step: int) -> None:
        """Count from now on for this step."""
        self._step, self._num = step, 0

    def end_step(self) -> None:
        """Note the step's number, unless the step before had as many; nothing outside of one."""
        if self._step is None:
            return
        is_same = bool(self._changes) and self._changes[-1][1] == self._num
        if not is_same and len(self._changes) < MOST_CHANGES:
            self._changes.append((self._step, self._num))
        self._step = None

    def take(self) -> list[tuple[int, int]]:
        """Return what was noted since the last call: from which step on it was how many."""
        changes, self._changes = self._changes, []
        return changes
