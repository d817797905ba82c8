"""A8: the device of a rank is a pure rule, and so is whether NCCL can serve the devices
chosen."""

import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from prefect_torch_ddp.protocol.rank import GangShape, RankLaunch, RankPlace
from prefect_torch_ddp.rank.distributed.backend import (
    Claim,
    agree_on_backend,
    device_index,
    device_name,
    why_not_nccl,
)


@pytest.mark.parametrize(
    ("position", "local_rank", "num_devices", "expected"),
    [
        (0, 3, 4, 0),  # dask-cuda: a worker per GPU, each sees its own first
        (1, 3, 4, 1),  # the second of two ranks on such a worker
        (None, 3, 4, 3),  # nobody set CUDA_VISIBLE_DEVICES: all see all GPUs, by their numbers
        (None, 5, 4, 1),  # more ranks than GPUs share them
        (None, 2, 1, 0),  # a scheduler that shows each worker its one GPU as number 0
        (1, 1, 1, 0),  # two MIG instances are named, and CUDA shows a process the first alone
    ],
)
def test_device_index(
    position: int | None, local_rank: int, num_devices: int, expected: int
) -> None:
    """The rule for each way of sharing GPUs out."""
    assert device_index(position, local_rank, num_devices) == expected


def claim(rank: int, device: str | None, host: str = "gpu1") -> Claim:
    """Make a rank's claim."""
    return Claim(rank, host, device, "1 CUDA devices are visible there, CUDA_VISIBLE_DEVICES 0")


def test_nccl_serves_a_device_each() -> None:
    """Ranks on devices of their own, also with the same number on different machines, can use
    NCCL."""
    assert (
        why_not_nccl(
            [claim(0, "a 0000:01:00"), claim(1, "a 0000:02:00"), claim(2, "b 0000:01:00", "gpu2")]
        )
        is None
    )


def test_nccl_refuses_ranks_that_share_a_device() -> None:
    """The reason names the ranks, the host and the number of devices, instead of two NCCL ranks
    silently on one device."""
    reason = why_not_nccl(
        [
            claim(0, "a 0000:01:00"),
            claim(1, "a 0000:02:00"),
            claim(2, "a 0000:01:00"),
            claim(3, "a 0000:01:00"),
        ]
    )
    assert reason is not None
    assert "ranks 0, 2 and 3 on gpu1" in reason
    assert "1 CUDA devices are visible there, CUDA_VISIBLE_DEVICES 0" in reason


def test_nccl_needs_cuda_on_every_rank() -> None:
    """One rank without a device keeps all from NCCL: they have to use one backend."""
    assert (
        why_not_nccl([claim(0, "a 0000:01:00"), claim(1, None, "cpu7")])
        == "rank 1 on cpu7 can't use it"
    )


def launch(rank: int, world_size: int, backend: str) -> RankLaunch:
    """Make the launch order of one rank."""
    place = RankPlace(
        rank=rank,
        local_rank=rank,
        node_rank=0,
        slot=rank,
        worker="tcp://a:1",
        host="a",
        address="a",
    )
    return RankLaunch(
        place=place,
        shape=GangShape(world_size, 1, (world_size,)),
        gang_id="g",
        attempt=1,
        max_restarts=0,
        master_addr="a",
        master_port=1,
        store_fd=None,
        process_group="default",
        backend=backend,  # type: ignore[arg-type]
        rendezvous_timeout_s=20.0,
        extra_sys_path=(),
        launcher="auto",
    )


def agreed(
    devices: list[str | None], backend: str, monkeypatch: pytest.MonkeyPatch
) -> list[object]:
    """Have ranks with these devices agree, over a real store; returns what each got, or the
    error it raised."""
    from prefect_torch_ddp.rank.distributed import backend as module

    mine = threading.local()
    monkeypatch.setattr(module, "device_name", lambda _device: mine.device)
    monkeypatch.setattr(module, "num_devices_seen", lambda: "1 seen")
    monkeypatch.setattr(
        module,
        "own_backend",
        lambda asked: module.BOTH if mine.device and asked == "auto" else "gloo",
    )
    if backend == "nccl":
        monkeypatch.setattr(module, "own_backend", lambda asked: asked)
    server = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20)
    )
    got: list[object] = [None] * len(devices)

    def run(rank: int) -> None:
        mine.device = devices[rank]
        store = dist.TCPStore(
            "127.0.0.1", server.port, wait_for_workers=False, timeout=timedelta(seconds=20)
        )
        try:
            got[rank] = agree_on_backend(launch(rank, len(devices), backend), store)
        except RuntimeError as error:
            got[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(devices))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return got


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        (["x", "y"], "cpu:gloo,cuda:nccl"),
        (["x", "x"], "gloo"),  # two ranks on one GPU still train
        (["x", None], "gloo"),  # one host of the gang has no GPU
        ([None, None], "gloo"),
    ],
)
def test_auto_is_the_same_backend_on_all_ranks(
    devices: list[str | None], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A7: `auto` takes nccl where every rank has a device of its own, else gloo, for all of
    them."""
    assert agreed(devices, "auto", monkeypatch) == [expected] * len(devices)


def test_nccl_that_was_asked_for_is_refused_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """A7: who asks for nccl with more ranks than devices is told so by each rank; nobody waits
    for the others."""
    errors = agreed(["x", "x"], "nccl", monkeypatch)
    assert all(
        "backend 'nccl' can't be used: ranks 0 and 1 on a share one device (1 seen)" in str(error)
        for error in errors
    )
    assert agreed(["x", "y"], "nccl", monkeypatch) == ["nccl", "nccl"]


def test_the_cpu_has_no_device_name() -> None:
    """Ranks on the CPU never share a device."""
    assert device_name(torch.device("cpu")) is None
