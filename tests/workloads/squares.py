"""A small dataset that spawned DataLoader workers can import."""

from collections.abc import Callable

from torch.utils.data import Dataset


class Squares(Dataset[int]):
    """The squares of 0 to n-1, transformed if asked."""

    def __init__(self, num_samples: int, transform: Callable[[int], int] | None = None) -> None:
        """Keep the transform."""
        self._num_samples = num_samples
        self._transform = transform

    def __len__(self) -> int:
        """Return the number of samples."""
        return self._num_samples

    def __getitem__(self, index: int) -> int:
        """Return one square."""
        square = index * index
        return self._transform(square) if self._transform else square
