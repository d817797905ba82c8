"""Gradients that are there when a checkpoint is written, which doesn't have them.

Most programs set them to zero before they make new ones. Whether a program uses them in a later
step is known only once its optimizer has done so.
"""

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch

logger = logging.getLogger(__name__)


class GradientWatch:
    """Warns, once, if an optimizer used gradients that a checkpoint should have had.

    A save holds one gradient of each tracked optimizer. A resumed training doesn't have it. That
    matters only if the optimizer's next step uses it: as it is, or after a backward pass added to
    it. So nothing is said before that step, and nothing if the gradient was set to zero or to None.
    """

    def __init__(self) -> None:
        """Hold nothing until a save."""
        self._held: dict[str, _HeldGradient] = {}
        self._has_warned = False

    def take(self, objects: Mapping[str, Any]) -> None:
        """Watch the steps of those that are optimizers of torch."""
        for name, item in objects.items():
            if _calls_hooks(item):
                # Never removed: a change of the hooks would have a compiled step compiled again.
                item.register_step_post_hook(_AfterStep(self, name))

    def hold(self, objects: Mapping[str, Any], step: int) -> None:
        """Hold what a checkpoint of this number lacks."""
        for held in self._held.values():
            held.release()
        self._held = {}
        for name, item in objects.items():
            if not self._has_warned and _calls_hooks(item):
                trained = [each for group in item.param_groups for each in group["params"]]
                dense = [each for each in trained if each.requires_grad and _is_dense(each.grad)]
                if dense:
                    smallest = min(dense, key=torch.Tensor.numel)
                    self._held[name] = _HeldGradient(smallest, step)

    def stepped(self, name: str) -> None:
        """Judge what was held, after a step of its optimizer."""
        held = self._held.get(name)
        if held is None or self._has_warned or not held.was_used():
            return
        self._has_warned = True
        logger.warning(
            "the tracked optimizer %r has used gradients that backward passes had made before "
            "checkpoint %d, and such gradients aren't in checkpoints: a training that resumes "
            "there gets other weights. Accumulate within a step, by ctx.micro_batches; or set "
            "gradients to zero before the first backward pass of a step",
            name,
            held.step,
        )


class _HeldGradient:
    """A gradient at a save, and what became of it."""

    def __init__(self, parameter: torch.Tensor, step: int) -> None:
        self.step = step
        self._parameter = parameter
        self._gradient = parameter.grad
        self._version = _version(parameter.grad)
        self._is_there = self._was_added_to = False
        # Only the first hook sees what a pass adds to; only the second isn't called by
        # torch.autograd.grad, which adds to nothing.
        before, after = HeldHook(self._before), HeldHook(self._after)
        first: Any = parameter.register_hook
        second: Any = parameter.register_post_accumulate_grad_hook
        self._handles = [first(before), second(after)]

    def release(self) -> None:
        """Look at the parameter no more."""
        self._gradient = None
        for handle in self._handles:
            handle.remove()

    def was_used(self) -> bool:
        """Tell, after the optimizer's step, if it used this gradient; forget it."""
        gradient, self._gradient = self._gradient, None
        if gradient is None or self._parameter.grad is not gradient:
            return False
        is_same = _version(gradient) == self._version
        return (is_same or self._was_added_to) and bool(gradient.any())

    def _before(self, _added: torch.Tensor) -> None:
        gradient = self._gradient
        if gradient is not None:
            self._is_there = self._parameter.grad is gradient and bool(gradient.any())

    def _after(self, _parameter: torch.Tensor) -> None:
        if self._is_there:
            self._was_added_to = True
        else:
            self._gradient = None  # it began from zero


class HeldHook:
    """A hook of a parameter whose gradient is held; it changes nothing."""

    def __init__(self, note: Callable[[torch.Tensor], None]) -> None:
        """Have it note what it is called with."""
        self._note = note

    def __call__(self, given: torch.Tensor) -> None:
        """Note it."""
        self._note(given)


class _AfterStep:
    """What an optimizer calls after each of its steps."""

    def __init__(self, watch: GradientWatch, name: str) -> None:
        self._watch, self._name = watch, name

    def __call__(self, *_: Any) -> None:
        if not torch.compiler.is_compiling():
            self._watch.stepped(self._name)


def _version(gradient: torch.Tensor | None) -> int:
    """Return how often it was changed in place."""
    assert gradient is not None
    return gradient._version  # noqa: SLF001 - torch has no other


def _calls_hooks(item: Any) -> bool:
    """Tell an optimizer of torch from all else, and from wrappers that call another's step."""
    return hasattr(item, "_optimizer_step_post_hooks")


def _is_dense(gradient: torch.Tensor | None) -> bool:
    return gradient is not None and gradient.layout == torch.strided
