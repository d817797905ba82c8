"""A8: which of its worker's devices a rank takes is a pure rule; device counts are made up
here."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefect_torch_ddp.gang.caller.placement import share_out, visible_names


@pytest.mark.parametrize(
    ("text", "names"),
    [
        (None, None),
        ("", ()),
        ("-1", ()),
        ("NoDevFiles", ()),
        ("0,1", ("0", "1")),
        (" 1 , 0 ", ("1", "0")),
        ("0,-1,1", ("0",)),  # CUDA stops there
        ("GPU-8932f937,MIG-5c2a", ("GPU-8932f937", "MIG-5c2a")),
    ],
)
def test_names_in_cuda_visible_devices(text: str | None, names: tuple[str, ...] | None) -> None:
    """Numbers, UUIDs of GPUs and of MIG instances, and the ways to say none."""
    assert visible_names(text) == names


@pytest.mark.parametrize(
    ("lists", "devices"),
    [
        (["0,1", "1,0"], ["0", "1"]),  # dask-cuda: each worker its own first
        (["0,1", "1,0", "0,1", "1,0"], ["0", "1", "0", "1"]),  # two such workers a GPU
        (
            ["0,1"] * 2 + ["1,0"] * 2,
            ["0", "1", "1", "0"],
        ),  # two ranks on each of dask-cuda's workers
        (
            ["0,1,2,3"] * 4,
            ["0", "1", "2", "3"],
        ),  # one worker with a rank per GPU, or plain workers that see all
        (["0", "1"], ["0", "1"]),  # a scheduler gives each worker one
        (["0,1"] * 2 + ["2,3"] * 2, ["0", "1", "2", "3"]),  # and here two
        (["GPU-a", "GPU-b"], ["GPU-a", "GPU-b"]),
        (["MIG-a,MIG-b"] * 2, ["MIG-a", "MIG-b"]),
        (["0,1"] * 3, ["0", "1", "0"]),  # more ranks than devices
        (["1,0", None, "0"], ["1", None, "0"]),
        (["0,1", ""], ["0", None]),
    ],
)
def test_devices_of_a_hosts_ranks(lists: list[str | None], devices: list[str | None]) -> None:
    """The device of each rank, for every way of sharing GPUs out that is known."""
    visible = [visible_names(text) for text in lists]
    chosen = [
        names[position] if names and position is not None else None
        for names, position in zip(visible, share_out(visible), strict=True)
    ]
    assert chosen == devices


@given(num_devices=st.integers(1, 8), num_ranks=st.integers(1, 20), data=st.data())
def test_devices_are_shared_evenly_whatever_the_order_of_the_lists(
    num_devices: int, num_ranks: int, data: st.DataObject
) -> None:
    """Where all see the same devices, in any order, none has two ranks more than another, and
    positions are in the list."""
    names = [str(number) for number in range(num_devices)]
    visible = [tuple(data.draw(st.permutations(names))) for _ in range(num_ranks)]
    positions = share_out(visible)
    counts = Counter(
        names[position]
        for names, position in zip(visible, positions, strict=True)
        if position is not None
    )
    assert sum(counts.values()) == num_ranks
    assert max(counts.values()) - min(counts[name] for name in names) <= 1


@given(num_workers=st.integers(1, 8), ranks_per_worker=st.integers(1, 4))
def test_workers_with_devices_of_their_own_never_share(
    num_workers: int, ranks_per_worker: int
) -> None:
    """Where each worker sees as many devices of its own as it has ranks, every rank has its
    own."""
    visible = [
        tuple(f"GPU-{worker}-{device}" for device in range(ranks_per_worker))
        for worker in range(num_workers)
        for _ in range(ranks_per_worker)
    ]
    chosen = [
        names[position or 0] for names, position in zip(visible, share_out(visible), strict=True)
    ]
    assert len(set(chosen)) == len(chosen)
