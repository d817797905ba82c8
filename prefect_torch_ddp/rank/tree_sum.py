"""Owns one fixed order of summation: a balanced binary tree over numbered leaves, whoever holds which of them. Pure."""

from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class TreeSum(Generic[T]):
    """Adds up values of leaves, or of whole branches, in the tree's order.

    Each branch is the sum of its two halves. Values are pushed from left to right; what can be added is added at once, so no
    more than one value for each level of the tree is held.
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
        """The largest branches that are complete, from left to right: the leaves of each, and its sum."""

    def push(self, leaves: range, value: T) -> None:
        """Take the value of the branch of these leaves, which follow those pushed before."""
        self.branches.append((leaves, value))
        while len(self.branches) > 1 and self._are_halves(self.branches[-2][0], self.branches[-1][0]):
            right_leaves, right = self.branches.pop()
            left_leaves, left = self.branches.pop()
            self.branches.append((range(left_leaves.start, right_leaves.stop), self._add(left, right)))

    def _are_halves(self, left: range, right: range) -> bool:
        """Tell whether two neighbours are the halves of one branch."""
        branch = range(self.num_leaves)
        while len(branch) > 1:
            middle = branch.start + len(branch) // 2
            if (branch.start, middle, branch.stop) == (left.start, right.start, right.stop):
                return True
            branch = range(branch.start, middle) if right.stop <= middle else range(middle, branch.stop)
        return False


def branches_of(leaves: range, num_leaves: int) -> list[range]:
    """Return the largest branches that a holder of these leaves can add up by itself."""
    tree: TreeSum[None] = TreeSum(num_leaves, lambda _left, _right: None)
    for leaf in leaves:
        tree.push(range(leaf, leaf + 1), None)
    return [branch for branch, _ in tree.branches]
