"""Owns the environment a rank starts with: its Dask worker's own, plus torchrun's contract. Pure."""

from collections.abc import Mapping

from prefect_torch_ddp.messages import RankLaunch

# Names and meaning: https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables


def rank_environment(worker_environment: Mapping[str, str], launch: RankLaunch) -> dict[str, str]:
    """Return the rank's environment; the worker's is not changed.

    TORCHELASTIC_USE_AGENT_STORE is taken out: in the user mode rank 0 must listen at MASTER_PORT itself.
    """
    place, shape = launch.place, launch.shape
    contract = {
        "RANK": place.rank,
        "WORLD_SIZE": shape.world_size,
        "LOCAL_RANK": place.local_rank,
        "LOCAL_WORLD_SIZE": shape.local_world_sizes[place.node_rank],
        "GROUP_RANK": place.node_rank,
        "GROUP_WORLD_SIZE": shape.num_nodes,
        "ROLE_RANK": place.rank,
        "ROLE_WORLD_SIZE": shape.world_size,
        "MASTER_ADDR": launch.master_addr,
        "MASTER_PORT": launch.master_port,
        "TORCHELASTIC_RUN_ID": launch.gang_id,
        "TORCHELASTIC_RESTART_COUNT": launch.attempt - 1,
        "TORCHELASTIC_MAX_RESTARTS": launch.max_restarts,
    }
    environment = dict(worker_environment) | {name: str(value) for name, value in contract.items()}
    environment.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    return environment
