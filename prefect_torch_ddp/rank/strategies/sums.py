"""Whether optimizers step on gradients that the ranks have summed; and how many passes they sum.

Each rank sees the first by itself, without talking to others: a wrapped model's communication hook
ran, or it didn't. What it finds is proved: the optimizer is about to make the replicas differ. How
many passes each step summed is compared at a checkpoint.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from prefect_torch_ddp.errors import InvalidParamsError

MOST_CHANGES = 500
"""So many changes of the number of passes are kept between two checkpoints: the first counts."""


@dataclass
class _Wrapped:
    """What a model was when it was wrapped."""

    summed: frozenset[int]
    """The ids of the parameters that its passes sum, or that it was told to ignore."""
    has_summed: bool = False


@dataclass
class _Suspects:
    """The parameters of an optimizer that mustn't have a gradient in its step."""

    known: tuple[int, int] = (-1, -1)
    """The optimizer's number of parameters and the watch's of changes, as of which they hold."""
    parameters: list[torch.Tensor] = field(default_factory=list)


class SumWatch:
    """Refuses steps of optimizers on gradients that the ranks haven't summed."""

    def __init__(self) -> None:
        """Watch nothing until a model is wrapped."""
        self.passes = Passes()
        self._wrapped: WeakKeyDictionary[nn.Module, _Wrapped] = WeakKeyDictionary()
        self._suspects: WeakKeyDictionary[torch.optim.Optimizer, _Suspects] = WeakKeyDictionary()
        self._num_changes = 0
        self._left: dict[int, ref[DistributedDataParallel]] = {}
        """Parameters with a gradient of a pass that isn't summed, by id, and whose pass it was."""
        self._handles: list[Any] = []

    def take(self, model: nn.Module, ddp: DistributedDataParallel | None) -> None:
        """Watch a model from now on; without a DDP it has nothing to train yet."""
        if not self._handles:
            self._handles.append(register_optimizer_step_pre_hook(_BeforeStep(ref(self))))
        trained = [each for each in model.parameters() if each.requires_grad]
        ignored = getattr(model, "_ddp_params_and_buffers_to_ignore", ())
        left_out = [each for name, each in model.named_parameters() if name in ignored]
        self._wrapped[model] = _Wrapped(frozenset(map(id, [*trained, *left_out])))
        self._num_changes += 1
        # Of a whole pass one of both gets a gradient, unless the model has several ends.
        probed = {id(each): each for each in (*trained[:1], *trained[-1:])}
        if ddp is not None:
            probe = Probe(ref(self), ref(ddp))
            for parameter in probed.values():
                register: Any = parameter.register_post_accumulate_grad_hook
                self._handles.append(register(probe))

    def summed(self, model: nn.Module, *, counts: bool) -> None:
        """Note that a whole backward pass of a wrapped model, or of its copy, is being summed.

        It doesn't count within `join`, where ranks may make different numbers of passes.
        """
        if counts:
            self.passes.count()
        wrapped = self._wrapped.get(model)
        if wrapped is None:
            return
        if not wrapped.has_summed:
            wrapped.has_summed = True
            self._num_changes += 1
        for parameter in [each for each in self._left if each in wrapped.summed]:
            del self._left[parameter]

    def accumulated(self, parameter: torch.Tensor, ddp: DistributedDataParallel) -> None:
        """Note a gradient; the pass that it is of may be summed right after."""
        # What the user doesn't want to be summed (no_sync) is his to sum later, or to average.
        if ddp.require_backward_grad_sync:
            self._left[id(parameter)] = ref(ddp)
        else:
            self._left.pop(id(parameter), None)

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse, by InvalidParamsError, a step that would make the replicas differ."""
        groups = optimizer.param_groups
        known = sum(len(group["params"]) for group in groups), self._num_changes
        suspects = self._suspects.setdefault(optimizer, _Suspects())
        if suspects.known != known:
            suspects.known, suspects.parameters = known, self._suspects_in(groups)
        for parameter in suspects.parameters:
            if parameter.grad is not None:
                self._refuse_unsummed(parameter)
        if not self._left:
            return
        for parameter in (each for group in groups for each in group["params"]):
            of_ddp = self._left.get(id(parameter))
            if of_ddp is not None and of_ddp() is not None and parameter.grad is not None:
                self._refuse_second(parameter)

    def close(self) -> None:
        """Watch nothing any more."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _suspects_in(self, groups: list[dict[str, Any]]) -> list[torch.Tensor]:
        """Return what belongs to a wrapped model and no pass has summed yet, or ever will."""
        wrapped = list(self._wrapped.values())
        of_models = {id(each) for model in self._wrapped for each in model.parameters()}
        summed = {each for one in wrapped if one.has_summed for each in one.summed}
        suspected = of_models - summed
        return [each for group in groups for each in group["params"] if id(each) in suspected]

    def _refuse_unsummed(self, parameter: torch.Tensor) -> None:
        for model in self._wrapped:
            names = (name for name, each in model.named_parameters() if each is parameter)
            if (name := next(names, None)) is None:
                continue
            if any(id(parameter) in each.summed for each in self._wrapped.values()):
                msg = (
                    f"an optimizer is about to step on the gradient of {name}, which no other rank "
                    f"has added to: no backward pass went through what ctx.wrap returned for this "
                    f"{type(model).__name__}. Call that in the forward pass, not the model given "
                    "to ctx.wrap and not .module; a model whose gradients you sum yourself isn't "
                    "to be wrapped"
                )
            else:
                msg = (
                    f"an optimizer is about to step on the gradient of {name}, which the ranks "
                    f"don't sum: it wasn't trainable when this {type(model).__name__} was given to "
                    "ctx.wrap. Call ctx.wrap(model) again after you change which parameters are "
                    "trained, or have all of them trainable before it"
                )
            raise InvalidParamsError(msg)

    def _refuse_second(self, parameter: torch.Tensor) -> None:
        named = (pair for model in self._wrapped for pair in model.named_parameters())
        name = next((name for name, each in named if each is parameter), "a parameter")
        msg = (
            f"an optimizer is about to step on the gradient of {name}, to which this rank has "
            "added a backward pass that the ranks didn't sum: it came after another one of the "
            "same forward pass, or of one before the latest, or went past what ctx.wrap returned. "
            "Make one backward pass after each forward pass; of several losses of one forward "
            "pass, call backward on their sum"
        )
        raise InvalidParamsError(msg)


class Probe:
    """Notes each gradient that a parameter gets."""

    def __init__(self, watch: "ref[SumWatch]", ddp: "ref[DistributedDataParallel]") -> None:
        """Keep neither alive."""
        self._watch, self._ddp = watch, ddp

    def __call__(self, parameter: torch.Tensor) -> None:
        """Note one."""
        watch, ddp = self._watch(), self._ddp()
        if watch is not None and ddp is not None:
            watch.accumulated(parameter, ddp)

    def __deepcopy__(self, _memo: Mapping[int, Any]) -> "Probe":
        """Be shared by copies of a parameter, of which nothing is noted."""
        return self


class _BeforeStep:
    """What torch calls before each step of any optimizer."""

    def __init__(self, watch: "ref[SumWatch]") -> None:
        self._watch = watch

    def __call__(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        watch = self._watch()
        if watch is not None and not torch.compiler.is_compiling():
            watch.check(optimizer)


class Passes:
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
