"""The lines of a gang's ranks in the log of their Prefect run, and what the flow shows of it."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from prefect.logging import get_run_logger

from prefect_torch_ddp.gang.caller.lines import rank_text, stack_line
from prefect_torch_ddp.protocol.events import AttemptBegan, GangEvent, LogLine, RankStack
from prefect_torch_ddp.tasks.report.progress import TrainingProgress
from prefect_torch_ddp.tasks.watch.terminal import Teller

if TYPE_CHECKING:
    import logging


def log_to_run(
    and_then: Callable[[GangEvent], None] = lambda _: None,
    training: TrainingProgress | None = None,
    name: str = "",
) -> Callable[[GangEvent], None]:
    """Make a receiver of gang events that logs the ranks' lines to the Prefect run, rank first.

    The flow gets what its display shows, how far the training is included.

    Args:
        and_then: receives all other events too.
        training: what is known of it.
        name: what the attempts train, to be logged.
    """
    teller = Teller(training)
    asked = training.world_size if training else 0
    logger: logging.Logger | logging.LoggerAdapter[Any] = get_run_logger()

    def receive(event: GangEvent) -> None:
        if isinstance(event, RankStack):
            event = stack_line(event)
        if isinstance(event, LogLine):
            logger.log(event.level, "%s", rank_text(event))
            return
        if isinstance(event, AttemptBegan) and name:
            of = f" of {asked}" if event.world_size < asked else ""
            values = event.attempt, name, event.world_size, of
            logger.info("attempt %d trains %s on %d ranks%s", *values)
        and_then(event)
        teller.receive(event)

    return receive
