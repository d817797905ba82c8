"""Shards of an object: which of them make it, and how they are named in a storage."""

import pytest

from prefect_torch_ddp.checkpoint.shard import GENERATORS, Layout, Shard, uncovered

WHOLE = [Shard("model")]
SHARDS = [Shard.of_rank("loader", rank) for rank in range(2)]
AND_GENERATORS = [Shard.of_rank(GENERATORS, rank) for rank in range(2)]


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        pytest.param([*WHOLE, *SHARDS], None, id="a whole and shards of all ranks"),
        pytest.param([*reversed(SHARDS), *AND_GENERATORS, *WHOLE], None, id="in any order"),
        pytest.param([*WHOLE, *WHOLE, *SHARDS], ("model", "it was written 2 times"), id="twice"),
        pytest.param(SHARDS, ("model", "no rank wrote it"), id="none"),
        pytest.param(
            [*WHOLE, SHARDS[0]], ("loader", "the shard of rank 1 is missing"), id="a shard lacks"
        ),
        pytest.param(
            [*WHOLE, *SHARDS, SHARDS[0]],
            ("loader", "the shard of rank 0 was written 2 times"),
            id="a shard twice",
        ),
        pytest.param(
            [*WHOLE, *SHARDS, Shard.of_rank("loader", 2)],
            ("loader", "the shard of rank 2 doesn't belong to it"),
            id="a shard of a rank that isn't there",
        ),
        pytest.param(
            [*WHOLE, SHARDS[0], Shard("loader")],
            ("loader", "it was written as by_rank and as whole"),
            id="a whole and a shard",
        ),
        pytest.param(
            [*WHOLE, *SHARDS, AND_GENERATORS[1]],
            (GENERATORS, "the shard of rank 0 is missing"),
            id="something else, and not all of it",
        ),
    ],
)
def test_an_object_is_there_once(written: list[Shard], expected: tuple[str, str] | None) -> None:
    """As a whole by one rank, or as a shard by each; else the first that isn't is named."""
    assert uncovered(["model", "loader"], written, 2) == expected


@pytest.mark.parametrize(
    ("shard", "name"),
    [
        (Shard("model"), "model"),
        (Shard.of_rank("loader", 3), "loader.rank-00003"),
        (Shard.of_rank("steps-0", 123456), "steps-0.rank-123456"),
        (Shard.of_rank(GENERATORS, 3), "rank-00003"),
    ],
)
def test_a_shard_has_one_name(shard: Shard, name: str) -> None:
    """By which earlier versions find it, and by which theirs is recognised."""
    assert shard.name == name
    assert Shard.named(name) == shard


def test_a_stored_layout_keeps_its_name() -> None:
    """Other versions read it."""
    assert [str(layout) for layout in Layout] == ["whole", "by_rank"]
