"""Owns what the report says of the ledger. Pure."""

from collections.abc import Sequence
from itertools import groupby

from prefect_torch_ddp.results import EpochLedger, LedgerReport
from prefect_torch_ddp.tasks.markdown import text

MAX_LINES = 50
MAX_WARNED = 3


def ledger_warning(ledger: LedgerReport | None) -> list[str]:
    """Say it where the ledger isn't clean; nothing otherwise."""
    if ledger is None or ledger.is_clean:
        return []
    wrong = [str(epoch) for epoch in ledger.epochs if not epoch.is_clean] or [str(ledger)]
    more = [f"{len(wrong) - MAX_WARNED} more epochs"] if len(wrong) > MAX_WARNED else []
    lines = "\n".join(f"- {text(line)}" for line in [*wrong[:MAX_WARNED], *more])
    return [f"**The ledger is not clean**, so it is not shown that each sample was trained on once an epoch:\n\n{lines}"]


def ledger_section(ledger: LedgerReport | None) -> list[str]:
    """List what the ledger holds under a heading, equal epochs in one line; nothing where none was kept."""
    if ledger is None:
        return []
    lines = [_group_line(list(group)) for _, group in groupby(ledger.epochs, key=_kind)] or [str(ledger)]
    shown = [f"- {text(line)}" for line in lines[-MAX_LINES:]]
    left_out = [f"- the first {len(lines) - MAX_LINES} lines are left out"] if len(lines) > MAX_LINES else []
    sizes = ", ".join(f"{attempt} ({size} ranks)" for attempt, size in ledger.attempts.items())
    return ["## Ledger", "\n".join([*left_out, *shown]), f"By the steps that count, of attempt {sizes}." if sizes else ""]


def _kind(epoch: EpochLedger) -> object:
    """Return what epochs have in common that are told in one line."""
    return epoch.model_copy(update={"epoch": 0}) if epoch.is_clean else epoch


def _group_line(epochs: Sequence[EpochLedger]) -> str:
    first, last = epochs[0], epochs[-1]
    if first is last:
        return str(first)
    what = str(first).partition(": ")[2]
    return f"epochs {first.epoch} to {last.epoch}: {what}"
