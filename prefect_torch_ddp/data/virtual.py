"""Owns which parts of a global batch a rank holds: one, or under elastic determinism one for each of its virtual ranks."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

from prefect_torch_ddp.data.sampler import share_range
from prefect_torch_ddp.errors import InvalidParamsError


@dataclass(frozen=True)
class Parts:
    """Each global batch is cut into `num_parts`, of which this rank holds those numbered `mine`."""

    mine: range
    num_parts: int
    is_virtual: bool

    @classmethod
    def of_rank(cls, rank: int, world_size: int, virtual_ranks: int | None) -> "Parts":
        """Return a rank's part; where there are virtual ranks, those of as many of them as each rank holds, in order.

        Raises:
            InvalidParamsError: the ranks can't hold equally many virtual ranks.
        """
        if virtual_ranks is None:
            return cls(range(rank, rank + 1), world_size, is_virtual=False)
        if virtual_ranks < 1 or virtual_ranks % world_size:
            msg = (
                f"virtual_ranks is {virtual_ranks} and there are {world_size} ranks; their number must divide virtual_ranks, so "
                "that each rank holds equally many"
            )
            raise InvalidParamsError(msg)
        each = virtual_ranks // world_size
        return cls(range(rank * each, (rank + 1) * each), virtual_ranks, is_virtual=True)

    def sizes(self, num_global: int) -> dict[int, int]:
        """Return the samples of each of this rank's parts that isn't empty, by its number."""
        sizes = {part: len(share_range(num_global, part, self.num_parts)) for part in self.mine}
        return {part: size for part, size in sizes.items() if size}

    def num_local(self, num_global: int) -> int:
        """Return how many samples of a global batch this rank holds."""
        return sum(self.sizes(num_global).values())

    def gathered(self, loaded: Iterator[Any], nums_global: Iterable[int]) -> Iterator[Any]:
        """Yield a rank's batch for each global batch of those sizes, from what was loaded part by part."""
        for num_global in nums_global:
            # Where all parts are empty there is a stand-in, or a rank would have nothing to show for the step.
            sizes = self.sizes(num_global) or {self.mine[0]: 0}
            yield VirtualShares(tuple(VirtualShare(part, size, next(loaded)) for part, size in sizes.items()), num_global)
        yield from loaded  # nothing is left: lets the DataLoader end its workers


@dataclass(frozen=True)
class VirtualShare:
    """What one virtual rank has of a global batch."""

    virtual_rank: int
    num_samples: int
    """0 for a stand-in."""
    batch: Any


class VirtualShares:
    """A rank's batch under elastic determinism, for `rank.micro_batches` alone; any other use of it is an error that says so."""

    def __init__(self, shares: tuple[VirtualShare, ...], num_global: int) -> None:
        """Keep them.

        Args:
            shares: those of this rank's virtual ranks that have samples; else one stand-in.
            num_global: samples of the global batch.
        """
        self.shares = shares
        self.num_global = num_global

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        _refuse()

    def __getitem__(self, _key: object) -> Any:
        _refuse()

    def __iter__(self) -> Iterator[Any]:
        _refuse()

    def __len__(self) -> int:  # noqa: PLE0303 - it never returns
        _refuse()


def _refuse() -> NoReturn:
    msg = (
        "determinism='elastic' cuts the batch by virtual ranks: don't use it as it is, but take each piece from "
        "`for piece, weight in rank.micro_batches(batch):` and call backward on its weighted loss"
    )
    raise InvalidParamsError(msg)
