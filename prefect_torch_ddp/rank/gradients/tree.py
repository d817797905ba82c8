"""One fixed order of summation over numbered leaves, and the exchange by which ranks follow it."""

from collections.abc import Callable
from typing import Generic, TypeVar

import torch
import torch.distributed as dist

from prefect_torch_ddp.data.sampler import RankShares
from prefect_torch_ddp.rank.gradients.flat import Flat, add_in_place

T = TypeVar("T")


class TreeSum(Generic[T]):
    """Adds up values of leaves, or of whole branches, in the order of a balanced binary tree.

    Each branch is the sum of its two halves. Values are pushed from left to right; what can be
    added is added at once, so no more than one value for each level of the tree is held.
    """

    def __init__(self, num_leaves: int, add: Callable[[T, T], T]) -> None:
        """Make an empty one.

        Args:
            num_leaves: of the whole tree, also where only some of them are pushed here.
            add: adds two neighbours, the left one first.
        """
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


def total_over_ranks(tree: TreeSum[Flat], world_size: int) -> Flat:
    """Return the sum over the whole tree on every rank, each of which has its leaves' branches.

    Each rank adds up one slice of the elements for all, and gets the others' slices: traffic as
    of a ring all-reduce, where branches fit ranks.
    """
    if world_size == 1:
        ((_, total),) = tree.branches
        return total
    num_leaves = tree.num_leaves
    leaves = [RankShares.of_rank(rank, world_size, num_leaves).own for rank in range(world_size)]
    by_rank = [branches_of(of_rank, num_leaves) for of_rank in leaves]
    kinds = zip(*(flat for _, flat in tree.branches), strict=True)
    return [_total(list(own), by_rank, num_leaves) for own in kinds]


def _total(own: Flat, by_rank: list[list[range]], num_leaves: int) -> torch.Tensor:
    world_size, size, like = len(by_rank), own[0].numel(), own[0]
    chunk = -(-size // world_size)
    send = like.new_zeros(world_size, len(own), chunk)
    for i, flat in enumerate(own):
        padded = torch.nn.functional.pad(flat, (0, world_size * chunk - size))
        send[:, i] = padded.view(world_size, chunk)
    slices = _all_to_all(send, [len(branches) for branches in by_rank], chunk)
    tree: TreeSum[Flat] = TreeSum(num_leaves, add_in_place)
    branches = [branch for of_rank in by_rank for branch in of_rank]
    for branch, part in zip(branches, slices, strict=True):
        tree.push(branch, [part])
    ((_, (total,)),) = tree.branches
    return _all_gather(total, world_size)[:size].to(like.device)


def _all_to_all(send: torch.Tensor, nums_branches: list[int], chunk: int) -> torch.Tensor:
    """Send each rank its slice of our branches.

    Returns:
        Everybody's branches of our slice, of shape [branches, chunk].
    """
    outgoing = _bytes_of(send)
    each = chunk * send.element_size()
    received = outgoing.new_empty(sum(nums_branches) * each)
    dist.all_to_all_single(
        received,
        outgoing,
        output_split_sizes=[num * each for num in nums_branches],
        input_split_sizes=[send.shape[1] * each] * len(nums_branches),
    )
    return received.view(send.dtype).view(-1, chunk)


def _all_gather(own: torch.Tensor, world_size: int) -> torch.Tensor:
    outgoing = _bytes_of(own)
    received = outgoing.new_empty(world_size * outgoing.numel())
    dist.all_gather_into_tensor(received, outgoing)
    return received.view(own.dtype)


def _bytes_of(values: torch.Tensor) -> torch.Tensor:
    """Return plain bytes, which any backend carries, on the CPU where gloo carries them."""
    device = torch.device("cpu") if dist.get_backend() == "gloo" else values.device
    return values.contiguous().to(device).view(-1).view(torch.uint8)
