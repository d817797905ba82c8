"""How torchrun's numbers of ranks are read."""

import pytest

from prefect_torch_ddp import InvalidParamsError
from prefect_torch_ddp.cli.run_script import placed


@pytest.mark.parametrize(
    ("world_size", "per_node", "nodes", "ranks", "each"),
    [
        (None, None, None, 1, 1),
        (4, None, None, 4, 1),
        (None, 2, None, 2, 2),
        (None, 2, 3, 6, 2),
        (None, None, 3, 3, 1),
        (6, 2, None, 6, 2),
        (6, None, 3, 6, 2),
        (6, 2, 3, 6, 2),
    ],
)
def test_the_world_size_is_ranks_of_a_node_times_nodes(
    world_size: int | None, per_node: int | None, nodes: int | None, ranks: int, each: int
) -> None:
    """A node is a Dask worker, as in torchrun's flags, unless the world size is given."""
    assert placed(world_size, per_node, nodes) == (ranks, each)


@pytest.mark.parametrize("given", [(3, 2, None), (5, None, 2), (6, 2, 2), (1, None, 2)])
def test_numbers_that_contradict_each_other_are_refused(given: tuple[int, int, int]) -> None:
    """Before anything starts."""
    with pytest.raises(InvalidParamsError, match=f"--world-size is {given[0]}, .* times --nnodes"):
        placed(*given)
