"""Owns the exchange in which ranks add up tensors in one fixed tree; traffic as of a ring all-reduce where branches fit ranks."""

import torch
import torch.distributed as dist

from prefect_torch_ddp.data.virtual import Parts
from prefect_torch_ddp.rank.tree_sum import TreeSum, branches_of

Flat = list[torch.Tensor]
"""Flat tensors, one for each kind of gradient."""


def add_in_place(left: Flat, right: Flat) -> Flat:
    """Add the right ones to the left ones; an element's sum doesn't depend on where it is in its tensor."""
    for ours, other in zip(left, right, strict=True):
        ours.add_(other)
    return left


def total_over_ranks(tree: TreeSum[Flat], world_size: int) -> Flat:
    """Return the sum over the whole tree on every rank, of which each rank has the branches of its leaves.

    Each rank adds up one slice of the elements for all, and gets the others' slices.
    """
    if world_size == 1:
        ((_, total),) = tree.branches
        return total
    num_leaves = tree.num_leaves
    by_rank = [branches_of(Parts.of_rank(rank, world_size, num_leaves).mine, num_leaves) for rank in range(world_size)]
    kinds = zip(*(flat for _, flat in tree.branches), strict=True)
    return [_total(list(mine), by_rank, num_leaves) for mine in kinds]


def _total(mine: Flat, by_rank: list[list[range]], num_leaves: int) -> torch.Tensor:
    world_size, size, like = len(by_rank), mine[0].numel(), mine[0]
    chunk = -(-size // world_size)
    send = like.new_zeros(world_size, len(mine), chunk)
    for i, flat in enumerate(mine):
        padded = torch.nn.functional.pad(flat, (0, world_size * chunk - size))
        send[:, i] = padded.view(world_size, chunk)
    pieces = _all_to_all(send, [len(branches) for branches in by_rank], chunk)
    tree: TreeSum[Flat] = TreeSum(num_leaves, add_in_place)
    branches = [branch for of_rank in by_rank for branch in of_rank]
    for branch, piece in zip(branches, pieces, strict=True):
        tree.push(branch, [piece])
    ((_, (total,)),) = tree.branches
    return _all_gather(total, world_size)[:size].to(like.device)


def _all_to_all(send: torch.Tensor, nums_branches: list[int], chunk: int) -> torch.Tensor:
    """Send each rank its slice of our branches; return everybody's branches of our slice, [branches, chunk]."""
    outgoing = _bytes_of(send)
    received = outgoing.new_empty(sum(nums_branches) * chunk * send.element_size())
    each = chunk * send.element_size()
    dist.all_to_all_single(
        received,
        outgoing,
        output_split_sizes=[num * each for num in nums_branches],
        input_split_sizes=[send.shape[1] * each] * len(nums_branches),
    )
    return received.view(send.dtype).view(-1, chunk)


def _all_gather(mine: torch.Tensor, world_size: int) -> torch.Tensor:
    outgoing = _bytes_of(mine)
    received = outgoing.new_empty(world_size * outgoing.numel())
    dist.all_gather_into_tensor(received, outgoing)
    return received.view(mine.dtype)


def _bytes_of(values: torch.Tensor) -> torch.Tensor:
    """Return plain bytes, which any backend carries, whatever the dtype; on the CPU where gloo carries them."""
    device = torch.device("cpu") if dist.get_backend() == "gloo" else values.device
    return values.contiguous().to(device).view(-1).view(torch.uint8)
