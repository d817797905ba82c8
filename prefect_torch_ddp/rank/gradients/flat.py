"""Gradients of parameters as flat tensors, which are added up in one piece."""

from collections.abc import Mapping

import torch

from prefect_torch_ddp.errors import InvalidParamsError

Flat = list[torch.Tensor]
"""Flat tensors, one for each dtype and device of gradients."""


def add_in_place(left: Flat, right: Flat) -> Flat:
    """Add the right ones to the left ones.

    An element's sum doesn't depend on where it is in its tensor.
    """
    for ours, other in zip(left, right, strict=True):
        ours.add_(other)
    return left


class FlatGradients:
    """The gradients of some parameters as flat tensors, with marks of which parameters have one."""

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], spare: list[Flat]) -> None:
        """Start without gradients; existing ones are added to the sum later.

        Args:
            parameters: by name.
            spare: flat tensors of earlier steps to write to, since memory that is new to the
                process costs more than the copy.
        """
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._before = {id(parameter): parameter.grad for parameter in parameters.values()}
        kinds: dict[tuple[torch.dtype, torch.device], list[torch.nn.Parameter]] = {}
        for parameter in parameters.values():
            kinds.setdefault((parameter.dtype, parameter.device), []).append(parameter)
            parameter.grad = None
        self._kinds = list(kinds.values())
        self._spare = spare
        sizes = [sum(_real(parameter).numel() + 1 for parameter in kind) for kind in self._kinds]
        if any([len(flat) for flat in flats] != sizes for flats in spare):
            spare.clear()  # other parameters are trained now

    def take(self) -> Flat:
        """Return the gradients and leave none; zeros for a parameter that has none."""
        taken = []
        spare = self._spare.pop() if self._spare else [None] * len(self._kinds)
        for parameters, out in zip(self._kinds, spare, strict=True):
            has_one = [float(parameter.grad is not None) for parameter in parameters]
            marks = _real(parameters[0]).new_tensor(has_one)
            flats = [self._flat(parameter) for parameter in parameters]
            taken.append(torch.cat([*flats, marks], out=out))
            for parameter in parameters:
                parameter.grad = None
        return taken

    def put(self, total: Flat) -> None:
        """Give each parameter its part of the sum, a view; none to one without any gradient."""
        for parameters, flat in zip(self._kinds, total, strict=True):
            sizes = [_real(parameter).numel() for parameter in parameters]
            *parts, marks = torch.split(flat, [*sizes, len(parameters)])
            for parameter, part, mark in zip(parameters, parts, marks.tolist(), strict=True):
                before = self._before[id(parameter)]
                parameter.grad = before
                if mark:
                    gradient = _like(parameter, part)
                    parameter.grad = gradient if before is None else before + gradient

    def _flat(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        gradient = parameter.grad
        if gradient is None:
            return torch.zeros_like(_real(parameter), requires_grad=False).flatten()
        if gradient.layout != torch.strided:
            msg = (
                f"the gradient of {self._names[id(parameter)]} is sparse, which "
                "determinism='elastic' can't add up in its order; use sparse=False"
            )
            raise InvalidParamsError(msg)
        return _real(gradient).reshape(-1)


def _like(parameter: torch.nn.Parameter, part: torch.Tensor) -> torch.Tensor:
    """Return a flat part in the parameter's shape and layout."""
    real = part.view(_real(parameter).shape)
    shaped = torch.view_as_complex(real) if parameter.is_complex() else real
    if parameter.is_contiguous():
        return shaped
    return torch.empty_like(parameter, requires_grad=False).copy_(shaped)


def _real(values: torch.Tensor) -> torch.Tensor:
    values = values.detach()
    return torch.view_as_real(values) if values.is_complex() else values
