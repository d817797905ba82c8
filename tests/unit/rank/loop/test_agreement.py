"""An agreement of a world of one."""

from prefect_torch_ddp.rank.loop.agreement import Agreement, Outcome, Want, end_of, outside_after

NOTHING, STOP, STOP_EARLY, SAVE = Want.NOTHING, Want.STOP, Want.STOP_EARLY, Want.SAVE


def test_alone_it_is_decided_at_once() -> None:
    """A world of one: no store, no thread."""
    agreement = Agreement(0, 1, outside_after(0))
    assert agreement.reach(outside_after(0), end_of(1), NOTHING) is None
    assert agreement.reach(end_of(1), end_of(2), STOP | SAVE) == Outcome(end_of(1), STOP | SAVE)
    agreement.close()
