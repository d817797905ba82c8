"""Objects of which each rank has its own state: which one a rank takes from a checkpoint."""

import pytest

from prefect_torch_ddp.checkpoint.manifest import Manifest, ManifestObject
from prefect_torch_ddp.checkpoint.restore import find_own
from prefect_torch_ddp.checkpoint.shard import Layout
from prefect_torch_ddp.checkpoint.state.own_state import OwnState
from prefect_torch_ddp.errors import CheckpointError
from tests.support.tracked import Tracked


def saved_by(num_ranks: int) -> Manifest:
    """Return the manifest of a checkpoint with each rank's state."""
    shards = (
        ManifestObject("loader", "", 0, "", rank=rank, layout=Layout.BY_RANK)
        for rank in range(num_ranks)
    )
    model = ManifestObject("model", "", 0, "")
    return Manifest("run", 1, 1, 1, {}, num_ranks, objects=(model, *shards))


def test_a_rank_takes_its_own_state() -> None:
    """At the number of ranks that saved it; a whole object is no rank's own."""
    found = find_own(saved_by(2), "loader", OwnState(Tracked(), 1, 2))
    assert found is not None
    assert (found.object, found.rank) == ("loader", 1)
    assert find_own(saved_by(2), "model", OwnState(Tracked(), 1, 2)) is None
    assert [saved_by(2).num_owners(name) for name in ("loader", "model", "none")] == [2, 0, 0]


def test_at_another_number_of_ranks_no_state_is_taken() -> None:
    """An error names the object and both numbers, unless the object may start over."""
    said = "'loader' was tracked by ctx.track_each on 2 ranks, and here are 3: .*='begin'"
    with pytest.raises(CheckpointError, match=said):
        find_own(saved_by(2), "loader", OwnState(Tracked(), 1, 3))
    assert find_own(saved_by(2), "loader", OwnState(Tracked(), 1, 3, begins_anew=True)) is None
