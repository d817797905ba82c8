"""How many ranks a gang has on the workers there are: a pure decision."""

from hypothesis import given
from hypothesis import strategies as st

from prefect_torch_ddp.gang.caller.placement import GangSize


def test_a_size_that_divides_is_taken() -> None:
    """Three workers hold two of four ranks; where three are the fewest, four workers are waited
    for."""
    size = GangSize(most=4, fewest=1, ranks_per_worker=1, divides=4)
    assert [size.on(num_workers) for num_workers in range(1, 6)] == [1, 2, 2, 4, 4]
    assert GangSize(most=4, fewest=3, ranks_per_worker=1, divides=4).workers_for_fewest == 4
    assert [GangSize(None, None, 2, divides=6).on(num_workers) for num_workers in range(1, 5)] == [
        2,
        3,
        6,
        6,
    ]


@given(st.integers(1, 24), st.data())
def test_enough_workers_hold_a_size_between_the_fewest_and_the_most(
    divides: int, data: st.DataObject
) -> None:
    """Whatever is asked for: every number of workers from the fewest on gives a divisor within
    the bounds, more never fewer."""
    most = data.draw(st.sampled_from([n for n in range(1, divides + 1) if divides % n == 0]))
    fewest = data.draw(st.integers(1, most))
    size = GangSize(most, fewest, data.draw(st.integers(1, 4)), divides)
    assert size.workers_for_fewest <= size.workers_for_all
    sizes = [
        size.on(num_workers)
        for num_workers in range(size.workers_for_fewest, size.workers_for_all + 3)
    ]
    assert all(fewest <= n <= most and divides % n == 0 for n in sizes)
    assert sizes == sorted(sizes)
    assert sizes[-1] == most
