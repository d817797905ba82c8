"""The launch order of a rank, for tests that need one and look at little of it."""

from typing import Any

from prefect_torch_ddp.protocol.rank import CodePaths, GangShape, RankLaunch, RankPlace


def launch_of(rank: int, world_size: int, **fields: Any) -> RankLaunch:
    """Make one of a gang whose ranks are all on host a."""
    plain: dict[str, Any] = {
        "gang_id": "g",
        "attempt": 1,
        "max_restarts": 0,
        "master_addr": "a",
        "master_port": 1,
        "store_fd": None,
        "process_group": "default",
        "backend": "auto",
        "rendezvous_timeout_s": 20.0,
        "collective_timeout_s": None,
        "agent_timeout_s": 1.5,
        "code_paths": CodePaths(),
        "launcher": "auto",
    }
    place = RankPlace(rank, rank, 0, worker="tcp://a:1", host="a", address="a")
    return RankLaunch(place, GangShape(world_size, 1, (world_size,)), **plain | fields)
