"""The check of a training's ledger at its end, which the run's log tells."""

from prefect.logging import get_run_logger

from prefect_torch_ddp.records.ledger import read_ledger
from prefect_torch_ddp.results import LedgerReport
from prefect_torch_ddp.storage.protocol import Storage


def checked_ledger(storage: Storage, run_id: str) -> LedgerReport:
    """Check which samples a run trained on; say what was found."""
    ledger = read_ledger(storage, run_id)
    if ledger.is_clean:
        words = "the ledger of %d epochs is clean: each sample that was due was trained on once"
        get_run_logger().info(words, len(ledger.epochs))
    else:
        get_run_logger().error("the ledger of run %s is not clean:\n%s", run_id, ledger)
    return ledger
