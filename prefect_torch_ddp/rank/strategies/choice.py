"""Which strategy a training's gradients take; loads torch."""

from prefect_torch_ddp.rank.config import RankConfig, RankInfo
from prefect_torch_ddp.rank.heartbeat_writer import HeartbeatWriter
from prefect_torch_ddp.rank.strategies.ddp import ShareWeights
from prefect_torch_ddp.rank.strategies.elastic import VirtualRanks
from prefect_torch_ddp.rank.strategies.strategy import Strategy


def strategy_for(config: RankConfig, info: RankInfo, heartbeat: HeartbeatWriter) -> Strategy:
    """Make the strategy that the run's determinism asks for."""
    if config.is_elastic:
        return VirtualRanks(config, info, heartbeat)
    return ShareWeights(info, heartbeat)
