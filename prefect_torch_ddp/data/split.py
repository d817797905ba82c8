"""Owns the split of a dataset into training and held-out samples: fixed once by a seed, never
drawn again.
"""

from collections.abc import Hashable, Sequence

import numpy as np

from prefect_torch_ddp.errors import InvalidParamsError

MIN_SAMPLES = 2  # one for each side


def seeded_split(
    num_samples: int, held_out: float, seed: int, targets: Sequence[Hashable] | None = None
) -> tuple[list[int], list[int]]:
    """Split sample indices in two disjoint sorted lists that together hold each index once; the
    same for the same arguments.

    Args:
        num_samples: at least 2.
        held_out: share of the samples to hold out, between 0 and 1; at least one sample lands
            on each side.
        seed: not negative.
        targets: the class of each sample; given, every class is held out in the same share, as
            near as whole samples allow.

    Raises:
        InvalidParamsError: no such split is possible.
    """
    if num_samples < MIN_SAMPLES:
        msg = f"{num_samples} samples can't be split in two; at least {MIN_SAMPLES} are needed"
        raise InvalidParamsError(msg)
    if not 0 < held_out < 1:
        msg = f"held_out is {held_out}; it is a share of the samples, between 0 and 1"
        raise InvalidParamsError(msg)
    if seed < 0:
        msg = f"the split's seed is {seed}; it must not be negative"
        raise InvalidParamsError(msg)
    if targets is not None and len(targets) != num_samples:
        msg = f"targets has {len(targets)} classes for {num_samples} samples; give one per sample"
        raise InvalidParamsError(msg)
    num_held_out = min(max(round(num_samples * held_out), 1), num_samples - 1)
    classes = [range(num_samples)] if targets is None else _classes(targets)
    generator = np.random.default_rng(seed)
    held: list[int] = []
    for members, num in zip(
        classes, _apportion([len(members) for members in classes], num_held_out), strict=True
    ):
        held += [members[i] for i in generator.permutation(len(members))[:num].tolist()]
    chosen = set(held)
    return [i for i in range(num_samples) if i not in chosen], sorted(held)


def _classes(targets: Sequence[Hashable]) -> list[list[int]]:
    """Return the sample indices of each class, classes in the order they first appear."""
    members: dict[Hashable, list[int]] = {}
    for index, target in enumerate(targets):
        members.setdefault(target, []).append(index)
    return list(members.values())


def _apportion(sizes: Sequence[int], num: int) -> list[int]:
    """Share out `num` agents in proportion to the sizes, by largest remainder (Hamilton); ties
    go to the earlier class.
    """
    total = sum(sizes)
    agents = [size * num // total for size in sizes]
    by_remainder = sorted(range(len(sizes)), key=lambda i: -(sizes[i] * num % total))
    for i in by_remainder[: num - sum(agents)]:
        agents[i] += 1
    return agents
