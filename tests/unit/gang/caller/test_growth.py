"""When a gang says that it can't grow."""

from typing import Any

import pytest

from prefect_torch_ddp.gang.caller.growth import Growth
from prefect_torch_ddp.gang.caller.placement import GangSize
from prefect_torch_ddp.protocol.events import CheckpointCommitted, FunctionEnded, GangEvent, LogLine


@pytest.mark.parametrize(("num_now", "has_saved"), [(2, False), (2, True), (4, False)])
def test_a_training_without_a_checkpoint_says_once_that_it_could_not_grow(
    num_now: int, has_saved: bool
) -> None:
    """The message comes once for all ranks, and only if there was room to grow."""
    said: list[GangEvent] = []
    nobody: Any = None
    growth = Growth(nobody, nobody, GangSize(2, 2, 1, grown=4), (), num_now, said.append, nobody)
    if has_saved:
        growth.take(CheckpointCommitted(2, 0, 10))
    growth.take(FunctionEnded(0))
    growth.take(FunctionEnded(1))
    texts = [event.text for event in said if isinstance(event, LogLine)]
    does = "the gang does not grow beyond 2 ranks: no checkpoint was written while it ran"
    assert [does in text for text in texts] == [True] * (num_now == 2 and not has_saved)
