"""Objects that consist of shards: which of them make a whole, and which a rank takes."""

import pytest

from prefect_torch_ddp.checkpoint.keys import shard_name
from prefect_torch_ddp.checkpoint.manifest import Manifest, ManifestObject
from prefect_torch_ddp.checkpoint.state.own_state import OwnState, find_own, uncovered
from prefect_torch_ddp.errors import CheckpointError
from tests.support.tracked import Tracked

WHOLE = [("model", None)]
SHARDS = [(shard_name("loader", rank), rank) for rank in range(2)]


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        pytest.param([*WHOLE, *SHARDS], None, id="a whole and shards of all ranks"),
        pytest.param([*reversed(SHARDS), *WHOLE, ("rank-00000", 0)], None, id="in any order"),
        pytest.param([*WHOLE, *WHOLE, *SHARDS], "model", id="a whole twice"),
        pytest.param(SHARDS, "model", id="none"),
        pytest.param([*WHOLE, SHARDS[0]], "loader", id="a shard lacks"),
        pytest.param([*WHOLE, *SHARDS, SHARDS[0]], "loader", id="a shard twice"),
        pytest.param([*WHOLE, SHARDS[0], ("loader", None)], "loader", id="a whole and a shard"),
    ],
)
def test_an_object_is_there_once(
    written: list[tuple[str, int | None]], expected: str | None
) -> None:
    """As a whole by one rank, or as a shard by each; else the first that isn't is named."""
    assert uncovered(["model", "loader"], written, 2) == expected


def saved_by(num_ranks: int) -> Manifest:
    """Return the manifest of a checkpoint with each rank's state."""
    names = [(shard_name("loader", rank), rank) for rank in range(num_ranks)]
    shards = tuple(ManifestObject(name, "", 0, "", rank=rank) for name, rank in names)
    return Manifest("run", 1, 1, 1, {}, num_ranks, objects=shards)


def test_a_rank_takes_its_own_state() -> None:
    """At the number of ranks that saved it."""
    found = find_own(saved_by(2), "loader", OwnState(Tracked(), 1, 2))
    assert found is not None
    assert found.rank == 1


def test_at_another_number_of_ranks_no_state_is_taken() -> None:
    """An error names the object and both numbers, unless the object may start over."""
    said = "'loader' was tracked by ctx.track_each on 2 ranks, and here are 3: .*='begin'"
    with pytest.raises(CheckpointError, match=said):
        find_own(saved_by(2), "loader", OwnState(Tracked(), 1, 3))
    assert find_own(saved_by(2), "loader", OwnState(Tracked(), 1, 3, begins_anew=True)) is None
