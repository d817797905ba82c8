"""Owns what the reports say of a run's model and checkpoints: where they are, and how plain
PyTorch loads the model. Pure.

Owns what the report says of the ledger. Pure.

Owns the table of a run's failed attempts. Pure.
"""

from collections.abc import Sequence
from itertools import groupby
from urllib.parse import unquote, urlsplit

from prefect_torch_ddp.results import (
    CheckpointRef,
    EpochLedger,
    FailedAttempt,
    LedgerReport,
    TrainReport,
)
from prefect_torch_ddp.tasks.report.markdown import code, code_block, count, number, table, text


def checkpoint_list(report: TrainReport) -> str:
    """List where the model and the checkpoints are.

    Places are code, since `s3://` is no link that a browser could follow, and no table cells,
    which cut them off.
    """
    training = report.training
    roles: dict[tuple[int, int, str], list[str]] = {}
    refs: dict[tuple[int, int, str], CheckpointRef] = {}
    for role, ref in (
        ("evaluated", report.checkpoint),
        ("best", training.best_checkpoint),
        ("last", training.last_checkpoint),
    ):
        if ref is not None:
            place = (ref.step, ref.attempt, ref.uri)
            refs[place] = ref
            roles.setdefault(place, []).append(role)
    lines = []
    if report.model_uri is not None:
        card = f"{report.model_uri.rpartition('/')[0]}/model.json"
        lines.append(
            f"- **Model weights** of step {count(report.checkpoint.step)}: {code(report.model_uri)}; their card: {code(card)}"
        )
    for place, ref in refs.items():
        metrics = "".join(f", {text(name)} {number(value)}" for name, value in ref.metrics.items())
        which = " and ".join(roles[place]).capitalize()
        lines.append(
            f"- **{which} checkpoint**, step {count(ref.step)}, attempt {ref.attempt}{metrics}: {code(ref.uri)}"
        )
    return "\n".join(lines)


def load_section(model_uri: str | None) -> str:
    """Show how to load the model, or say why there is none."""
    if model_uri is None:
        return "No model was exported: `train` tracked none. `ctx.track(model=model)` names it."
    return f"Load the model, on any machine, with plain PyTorch:\n\n{load_code(model_uri)}"


def load_code(model_uri: str) -> str:
    """Show the three lines that load the model."""
    parts = urlsplit(model_uri)
    is_local, is_safetensors = parts.scheme in {"", "file"}, model_uri.endswith(".safetensors")
    path = repr(unquote(parts.path) if parts.scheme else model_uri)
    place = path if is_local else f"fsspec.open({model_uri!r}).open()"
    load = 'torch.load(file, map_location="cpu", weights_only=True)'
    if is_safetensors:
        load = (
            "safetensors.torch.load_file(file)"
            if is_local
            else "safetensors.torch.load(file.read())"
        )
    modules = ([] if is_local else ["fsspec"]) + [
        "safetensors.torch" if is_safetensors else "torch"
    ]
    return code_block(f"import {', '.join(modules)}\nfile = {place}\nmodel.load_state_dict({load})")


MAX_LINES = 50
MAX_WARNED = 3


def ledger_warning(ledger: LedgerReport | None) -> list[str]:
    """Say it where the ledger isn't clean; nothing otherwise."""
    if ledger is None or ledger.is_clean:
        return []
    wrong = [str(epoch) for epoch in ledger.epochs if not epoch.is_clean] or [str(ledger)]
    more = [f"{len(wrong) - MAX_WARNED} more epochs"] if len(wrong) > MAX_WARNED else []
    lines = "\n".join(f"- {text(line)}" for line in [*wrong[:MAX_WARNED], *more])
    return [
        f"**The ledger is not clean**, so it is not shown that each sample was trained on once an epoch:\n\n{lines}"
    ]


def ledger_section(ledger: LedgerReport | None) -> list[str]:
    """List what the ledger holds under a heading, equal epochs in one line; nothing where none
    was kept.
    """
    if ledger is None:
        return []
    lines = [_group_line(list(group)) for _, group in groupby(ledger.epochs, key=_kind)] or [
        str(ledger)
    ]
    shown = [f"- {text(line)}" for line in lines[-MAX_LINES:]]
    left_out = (
        [f"- the first {len(lines) - MAX_LINES} lines are left out"]
        if len(lines) > MAX_LINES
        else []
    )
    sizes = ", ".join(f"{attempt} ({size} ranks)" for attempt, size in ledger.attempts.items())
    return [
        "## Ledger",
        "\n".join([*left_out, *shown]),
        f"By the steps that count, of attempt {sizes}." if sizes else "",
    ]


def _kind(epoch: EpochLedger) -> object:
    """Return what epochs have in common that are told in one line."""
    return epoch.model_copy(update={"epoch": 0}) if epoch.is_clean else epoch


def _group_line(epochs: Sequence[EpochLedger]) -> str:
    first, last = epochs[0], epochs[-1]
    if first is last:
        return str(first)
    what = str(first).partition(": ")[2]
    return f"epochs {first.epoch} to {last.epoch}: {what}"


MAX_ROWS = 50


def failure_section(failures: Sequence[FailedAttempt]) -> list[str]:
    """Lay out the attempts that failed under a heading, the newest ones where there are many;
    nothing where none failed.
    """
    if not failures:
        return []
    lines = [
        [
            str(one.attempt),
            str(one.world_size or ""),
            "" if one.step is None else count(one.step),
            text(one.summary),
        ]
        for one in failures[-MAX_ROWS:]
    ]
    return [
        "## Failed attempts",
        table(["attempt", "ranks", "step", "failure"], lines, align="rrrl"),
    ]
