"""Gradients as flat tensors, added up over virtual ranks in one order on any number of ranks."""

from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

import torch
import torch.distributed as dist

from prefect_torch_ddp.data.sampler import RankShares
from prefect_torch_ddp.errors import InvalidParamsError

T = TypeVar("T")
Flat = list[torch.Tensor]
"""Flat tensors, one for each dtype and device of gradients."""


class FlatGradients:
    """The gradients of some parameters as flat tensors, with marks of which parameters have one."""

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        """Start without gradients; those that there are, by name, are added to the sum later."""
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._before = {id(parameter): parameter.grad for parameter in parameters.values()}
        kinds: dict[tuple[torch.dtype, torch.device], list[torch.nn.Parameter]] = {}
        for parameter in parameters.values():
            kinds.setdefault((parameter.dtype, parameter.device), []).append(parameter)
            parameter.grad = None
        self._kinds = list(kinds.values())

    def take(self) -> Flat:
        """Return the gradients and leave none; zeros for a parameter that has none."""
        taken = []
        for parameters in self._kinds:
            has_one = [float(parameter.grad is not None) for parameter in parameters]
            marks = _real(parameters[0]).new_tensor(has_one)
            taken.append(torch.cat([*map(self._flat, parameters), marks]))
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


class TreeSum(Generic[T]):
    """Adds up values of leaves, or of whole branches, in the order of a balanced binary tree.

    Each branch is the sum of its two halves. Values are pushed from left to right; what can be
    added is added at once, so no more than one value for each level of the tree is held.
    """

    def __init__(self, num_leaves: int, add: Callable[[T, T], T]) -> None:
        """Make an empty one of so many leaves; `add` adds two neighbours, the left one first."""
        self.num_leaves = num_leaves
        self._add = add
        self.branches: list[tuple[range, T]] = []
        """The largest complete branches, from left to right: the leaves of each, and its sum."""

    def push(self, leaves: range, value: T) -> None:
        """Take the value of the branch of these leaves, which follow those pushed before."""
        self.branches.append((leaves, value))
        while len(self.branches) > 1:
            (left_leaves, left), (right_leaves, right) = self.branches[-2:]
            if not self._are_halves(left_leaves, right_leaves):
                return
            branch = range(left_leaves.start, right_leaves.stop)
            self.branches[-2:] = [(branch, self._add(left, right))]

    def _are_halves(self, left: range, right: range) -> bool:
        branch = range(self.num_leaves)
        while len(branch) > 1:
            middle = branch.start + len(branch) // 2
            if (branch.start, middle, branch.stop) == (left.start, right.start, right.stop):
                return True
            is_left = right.stop <= middle
            branch = range(branch.start, middle) if is_left else range(middle, branch.stop)
        return False


def branches_of(leaves: range, num_leaves: int) -> list[range]:
    """Return the largest branches that a holder of these leaves can add up by itself."""
    tree: TreeSum[None] = TreeSum(num_leaves, lambda _left, _right: None)
    for leaf in leaves:
        tree.push(range(leaf, leaf + 1), None)
    return [branch for branch, _ in tree.branches]


def add_in_place(left: Flat, right: Flat) -> Flat:
    """Add the right ones to the left; an element's sum doesn't depend on where it stands."""
    for ours, other in zip(left, right, strict=True):
        ours.add_(other)
    return left


def total_over_ranks(tree: TreeSum[Flat], world_size: int) -> Flat:
    """Return the sum over the whole tree on every rank, each of which has its leaves' branches.

    Each rank adds up one slice of the elements for all, and gets the others' slices: traffic as
    of a ring all-reduce, if branches fit ranks.
    """
    if world_size == 1:
        ((_, total),) = tree.branches
        return total
    num_leaves = tree.num_leaves
    by_rank = [
        branches_of(RankShares.of_rank(rank, world_size, num_leaves).own, num_leaves)
        for rank in range(world_size)
    ]
    kinds = zip(*(flat for _, flat in tree.branches), strict=True)
    return [_total(list(own), by_rank, num_leaves) for own in kinds]


def _total(own: Flat, by_rank: list[list[range]], num_leaves: int) -> torch.Tensor:
    """Add up one kind of gradients, of which this rank has its branches' sums."""
    world_size, size, like = len(by_rank), own[0].numel(), own[0]
    chunk = -(-size // world_size)
    send = like.new_zeros(world_size, len(own), chunk)
    for i, flat in enumerate(own):
        padded = torch.nn.functional.pad(flat, (0, world_size * chunk - size))
        send[:, i] = padded.view(world_size, chunk)
    outgoing, each = _bytes_of(send), chunk * like.element_size()
    nums_branches = [len(branches) for branches in by_rank]
    received = outgoing.new_empty(sum(nums_branches) * each)
    dist.all_to_all_single(
        received,
        outgoing,
        output_split_sizes=[num * each for num in nums_branches],
        input_split_sizes=[len(own) * each] * world_size,
    )
    tree: TreeSum[Flat] = TreeSum(num_leaves, add_in_place)
    branches = [branch for of_rank in by_rank for branch in of_rank]
    for branch, part in zip(branches, received.view(like.dtype).view(-1, chunk), strict=True):
        tree.push(branch, [part])
    ((_, (total,)),) = tree.branches
    gathered = received.new_empty(world_size * each)
    dist.all_gather_into_tensor(gathered, _bytes_of(total))
    return gathered.view(like.dtype)[:size].to(like.device)


def _bytes_of(values: torch.Tensor) -> torch.Tensor:
    """Return plain bytes, which any backend carries, on the CPU if gloo carries them."""
    device = torch.device("cpu") if dist.get_backend() == "gloo" else values.device
    return values.contiguous().to(device).view(-1).view(torch.uint8)
