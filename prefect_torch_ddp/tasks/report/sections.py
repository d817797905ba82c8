"""Sections of the report: the model and its checkpoints, the ledger, the failed attempts."""

from collections.abc import Mapping, Sequence
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

MAX_WARNED_EPOCHS = 3
MAX_LEDGER_LINES = 50
MAX_FAILURES = 50


def checkpoint_list(report: TrainReport) -> str:
    """List where the models and the checkpoints are.

    Locations are code, since a browser can't follow `s3://`, and no table cells, which cut them.
    """
    training = report.training
    roles: dict[str, list[str]] = {}
    refs: dict[str, CheckpointRef] = {}
    for role, ref in (
        ("evaluated", report.checkpoint),
        ("best", training.best_checkpoint),
        ("last", training.last_checkpoint),
    ):
        if ref is not None:
            refs[ref.uri] = ref
            roles.setdefault(ref.uri, []).append(role)
    lines = []
    for name, uri in training.model_uris.items():
        card = code(f"{uri.rpartition('.')[0]}.json")
        step = count(report.checkpoint.step)
        lines.append(f"- **Weights** of {code(name)}, step {step}: {code(uri)}; their card: {card}")
    for uri, ref in refs.items():
        metrics = "".join(f", {text(name)} {number(value)}" for name, value in ref.metrics.items())
        which = " and ".join(roles[uri]).capitalize()
        about = f"step {count(ref.step)}, attempt {ref.attempt}{metrics}"
        lines.append(f"- **{which} checkpoint**, {about}: {code(uri)}")
    return "\n".join(lines)


def load_section(model_uris: Mapping[str, str]) -> str:
    """Show how to load the models, or say why there is none."""
    if not model_uris:
        return "No model was exported: `train` tracked none. `ctx.track(model=model)` names it."
    blocks = [load_code(name, uri) for name, uri in model_uris.items()]
    return "\n\n".join(["Load the weights, on any machine, with plain PyTorch:", *blocks])


def load_code(name: str, model_uri: str) -> str:
    """Show the three lines that load a model; fsspec reads it where it isn't a local file."""
    parts = urlsplit(model_uri)
    path = repr(unquote(parts.path) if parts.scheme else model_uri)
    is_local, is_safetensors = parts.scheme in {"", "file"}, model_uri.endswith(".safetensors")
    modules = ["safetensors.torch" if is_safetensors else "torch"]
    load = 'torch.load(file, map_location="cpu", weights_only=True)'
    if is_safetensors:
        loader = "load_file(file)" if is_local else "load(file.read())"
        load = f"safetensors.torch.{loader}"
    if not is_local:
        modules.insert(0, "fsspec")
        path = f"fsspec.open({model_uri!r}).open()"
    lines = (f"import {', '.join(modules)}", f"file = {path}", f"{name}.load_state_dict({load})")
    return code_block("\n".join(lines))


def ledger_warning(ledger: LedgerReport | None) -> str:
    """Warn where the ledger isn't clean; nothing otherwise."""
    if ledger is None or ledger.is_clean:
        return ""
    wrong = [str(epoch) for epoch in ledger.epochs if not epoch.is_clean] or [str(ledger)]
    shown = wrong[:MAX_WARNED_EPOCHS]
    if len(wrong) > len(shown):
        shown.append(f"{len(wrong) - len(shown)} more epochs")
    lines = "\n".join(f"- {text(line)}" for line in shown)
    says = "so it is not shown that each sample was trained on once an epoch"
    return f"**The ledger is not clean**, {says}:\n\n{lines}"


def ledger_section(ledger: LedgerReport | None) -> str:
    """List what the ledger holds, equal epochs in one line; nothing where none was kept."""
    if ledger is None:
        return ""
    groups = [list(group) for _, group in groupby(ledger.epochs, key=_without_number)]
    lines = [_group_line(group) for group in groups] or [str(ledger)]
    num_left_out = max(0, len(lines) - MAX_LEDGER_LINES)
    shown = [f"- {text(line)}" for line in lines[num_left_out:]]
    if num_left_out:
        shown.insert(0, f"- the first {num_left_out} lines are left out")
    sizes = ", ".join(f"{attempt} ({size} ranks)" for attempt, size in ledger.attempts.items())
    ending = f"\n\nBy the steps that count, of attempt {sizes}." if sizes else ""
    return "## Ledger\n\n" + "\n".join(shown) + ending


def _without_number(epoch: EpochLedger) -> EpochLedger:
    return epoch.model_copy(update={"epoch": 0}) if epoch.is_clean else epoch


def _group_line(epochs: Sequence[EpochLedger]) -> str:
    first, last = epochs[0], epochs[-1]
    if first is last:
        return str(first)
    return f"epochs {first.epoch} to {last.epoch}: {str(first).partition(': ')[2]}"


def failure_section(failures: Sequence[FailedAttempt]) -> str:
    """Lay out the attempts that failed, the newest where there are many; nothing without any."""
    lines = []
    for one in failures[-MAX_FAILURES:]:
        step = "" if one.step is None else count(one.step)
        lines.append([str(one.attempt), str(one.world_size or ""), step, text(one.summary)])
    rows = table(["attempt", "ranks", "step", "failure"], lines, align="rrrl")
    return f"## Failed attempts\n\n{rows}" if lines else ""
