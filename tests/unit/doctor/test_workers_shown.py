"""How the doctor shows the workers of a cluster."""

import io

from rich.console import Console

from prefect_torch_ddp.doctor.command import Doctor
from prefect_torch_ddp.doctor.on_worker import WorkerFacts
from prefect_torch_ddp.protocol.messages import WorkerIdentity

ADDRESSES = ("tcp://192.168.100.101:40123", "tls://node-0117.compute.cluster.example:40123")


def test_addresses_are_whole_in_80_columns() -> None:
    """The doctor's table cut them, so that nobody could tell the workers apart."""
    screen = io.StringIO()
    doctor = Doctor(Console(file=screen, width=80), None, 60.0)
    workers = [
        WorkerIdentity(address, "p", "h", visible_devices=devices, occupant=occupant)
        for address, devices, occupant in zip(
            ADDRESSES, (None, "0,1"), (None, "gang 'nightly'"), strict=True
        )
    ]
    has = WorkerFacts(
        num_cores=8, can_fork=True, max_open_files=1_048_576, shared_memory_bytes=2**36
    )
    facts = dict.fromkeys(ADDRESSES, has)
    hosts = dict(zip(ADDRESSES, ("192.168.100.101", "node-0117-ib0.cluster.example"), strict=True))
    doctor._machines(workers, facts, hosts)
    lines = screen.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    for address in ADDRESSES:
        assert f"  {address.partition('://')[2]}" in lines
    said = " ".join(screen.getvalue().split())
    assert "ranks are forked at 192.168.100.101, 8 cores, up to 1,048,576 open files, 64.0" in said
    assert "at node-0117-ib0.cluster.example, 8 cores, CUDA_VISIBLE_DEVICES=0,1, up to" in said
    assert "64.0 GiB of shared memory free, held by gang 'nightly'" in said
    assert not doctor.problems
