"""Owns the rule by which a gang is taken to hang, and who is missing in it. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from prefect_torch_ddp.gang.orders import RankPulse
from prefect_torch_ddp.pulse import Phase

PATIENCE = 10.0
"""How many times the limit a rank may take where long waits are usual, or while it works hard."""
IN_BODY = {Phase.FUNCTION, Phase.STEP, Phase.EPOCH_END, Phase.COMPILING}
STRICT = {Phase.FUNCTION, Phase.STEP, Phase.STEP_END}
"""Where a rank that is idle waits for nothing that could come from elsewhere than its gang."""


@dataclass(frozen=True)
class Stall:
    """A gang without progress."""

    behind: tuple[RankPulse, ...]
    """The ranks that have come least far; the others, if there are any, wait for them."""
    ahead: tuple[RankPulse, ...]
    returned: tuple[RankPulse, ...]
    silent_s: float
    is_hung: bool
    """Whether nothing explains it any more; else it is only worth a word."""


def find_stall(ranks: Sequence[RankPulse], limit_s: float, *, from_start: bool) -> Stall | None:
    """Judge a gang by the pulses of all its ranks; None where it moves, or isn't watched yet.

    Args:
        ranks: all of the gang.
        limit_s: how long a rank may be idle in a step.
        from_start: whether the gang is watched before a rank has shown that it makes progress.
    """
    if any(rank.pulse.phase in (Phase.NONE, Phase.STARTING) for rank in ranks):
        return None
    if not (from_start or any(rank.pulse.armed for rank in ranks)):
        return None
    running = [rank for rank in ranks if rank.pulse.phase is not Phase.RETURNED]
    if not running:
        return None
    silent_s = min(rank.silent_s for rank in running)
    if silent_s < limit_s:
        return None
    least = min(map(_place, running))
    behind = tuple(rank for rank in running if _place(rank) == least)
    return Stall(
        behind=behind,
        ahead=tuple(rank for rank in running if rank not in behind),
        returned=tuple(rank for rank in ranks if rank not in running),
        silent_s=silent_s,
        is_hung=all(_is_over(rank, limit_s) for rank in behind),
    )


def _place(rank: RankPulse) -> tuple[int, bool, int]:
    pulse = rank.pulse
    return pulse.step, pulse.phase not in IN_BODY, pulse.seq


def _is_over(rank: RankPulse, limit_s: float) -> bool:
    """Tell whether nothing explains a rank's silence any more.

    A rank that works hard may be in a long step; loading, compiling, saving, restoring and validating may wait for long.
    """
    if rank.stopped:
        return rank.silent_s >= limit_s
    if rank.pulse.phase in STRICT:
        return rank.idle_s >= limit_s or rank.silent_s >= PATIENCE * limit_s
    return rank.idle_s >= PATIENCE * limit_s
