"""A failure of a rank, for tables of what follows it."""

from prefect_torch_ddp.protocol.events import RankFailure

BOOM = RankFailure(
    rank=1,
    host="b",
    pid=2,
    kind="exception",
    summary="ValueError: boom",
    exception_type="builtins.ValueError",
    step=12,
    retryability="open",
)
