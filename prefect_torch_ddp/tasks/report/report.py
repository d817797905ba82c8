"""The report of a finished run: a page of markdown, from values alone."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from urllib.parse import unquote, urlsplit

from prefect_torch_ddp.params import TrainParams
from prefect_torch_ddp.results import (
    CheckpointRef,
    EpochLedger,
    EpochRow,
    FailedAttempt,
    LedgerReport,
    Report,
    TrainReport,
)
from prefect_torch_ddp.tasks.report.evaluation import class_table, confusion_table
from prefect_torch_ddp.tasks.report.markdown import (
    code,
    code_block,
    count,
    duration,
    fact_table,
    join,
    number,
    percent,
    table,
    text,
)
from prefect_torch_ddp.tasks.report.run_record import RunRecord

MAX_EPOCH_ROWS = 50
MAX_METRIC_COLUMNS = 6
MAX_HEADLINE_METRICS = 3
MAX_WARNED_EPOCHS = 3
MAX_LEDGER_LINES = 50
MAX_FAILURES = 50


def render_report(
    report: TrainReport,
    params: TrainParams,
    record: RunRecord,
    curve: str = "",
    time_lost_s: float = 0.0,
) -> str:
    """Render the report of a finished run.

    Args:
        report: what the run returns.
        params: its parameters.
        record: its code and environment.
        curve: a markdown image, or nothing.
        time_lost_s: what failures cost, in seconds.
    """
    evaluation = report.evaluation
    models = load_section(report.training.model_uris)
    sections = {
        "Epochs": epoch_table(report.epochs),
        "Classes": class_table(evaluation),
        "Confusion matrix": confusion_table(evaluation),
        "Model and checkpoints": f"{checkpoint_list(report)}\n\n{models}",
        "Ledger": _ledger_lines(report.ledger),
        "Failed attempts": _failure_table(report.training.failures),
        "Run record": _run_record(report, params, record, time_lost_s),
    }
    return join(
        f"# {text(params.workload)}: {_headline(evaluation)}",
        _ledger_warning(report.ledger),
        curve,
        *(f"## {title}\n\n{body}" for title, body in sections.items() if body),
    )


def epoch_table(rows: Sequence[EpochRow]) -> str:
    """Lay out the epochs, the newest ones where there are many; nothing without any."""
    names = list(dict.fromkeys(name for row in rows for name in row.metrics))[:MAX_METRIC_COLUMNS]
    lines = []
    for row in rows[-MAX_EPOCH_ROWS:]:
        values = [number(row.metrics[name]) if name in row.metrics else "" for name in names]
        lines.append([str(row.epoch), count(row.num_steps), count(row.num_samples), *values])
    header = ["epoch", "steps", "samples", *map(text, names)]
    num_left_out = len(rows) - len(lines)
    ending = f"\n\nThe first {num_left_out} epochs are left out." if num_left_out else ""
    return table(header, lines, align="r" * len(header)) + ending if rows else ""


def _headline(evaluation: Report) -> str:
    accuracy = [] if evaluation.accuracy is None else [f"accuracy {percent(evaluation.accuracy)}"]
    loss = [] if evaluation.loss is None else [f"loss {number(evaluation.loss)}"]
    shown = list(evaluation.metrics.items())[:MAX_HEADLINE_METRICS]
    others = [f"{text(name)} {number(value)}" for name, value in shown]
    return ", ".join([*accuracy, *loss, *others, f"{count(evaluation.num_samples)} samples"])


def _run_record(
    report: TrainReport, params: TrainParams, record: RunRecord, time_lost_s: float
) -> str:
    training, dataset = report.training, report.dataset
    step = training.resumed_from_step
    facts = {
        "run": code(report.run_id),
        "workload": code(params.workload),
        "code": f"prefect-torch-ddp {text(record.code_version)}",
        "git commit": code(record.git_commit or ""),
        **{name: text(version) for name, version in record.versions.items()},
        "dataset": f"{count(dataset.num_files)} files, {count(dataset.num_bytes)} bytes",
        "dataset digest": code(dataset.digest),
        "dataset location": code(dataset.uri),
        "seed": str(params.seed),
        "world size": f"{training.world_size} ranks",
        "steps": f"{count(training.num_steps)} in {count(training.num_epochs)} epochs",
        "attempts": f"{training.attempt}" + ("" if step is None else f", resumed from step {step}"),
        "training time of the last attempt": duration(training.duration_s),
        "time lost to failures": duration(time_lost_s),
    }
    return fact_table(facts)


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
    is_local = parts.scheme in {"", "file"}
    path = repr(unquote(parts.path) if parts.scheme else model_uri)
    if not is_local:
        path = f"fsspec.open({model_uri!r}).open()"
    module, load = "torch", 'torch.load(file, map_location="cpu", weights_only=True)'
    if model_uri.endswith(".safetensors"):
        module = "safetensors.torch"
        load = f"{module}.load_file(file)" if is_local else f"{module}.load(file.read())"
    modules = module if is_local else f"fsspec, {module}"
    return code_block(f"import {modules}\nfile = {path}\n{name}.load_state_dict({load})")


def _ledger_warning(ledger: LedgerReport | None) -> str:
    if ledger is None or ledger.is_clean:
        return ""
    wrong = [str(epoch) for epoch in ledger.epochs if not epoch.is_clean] or [str(ledger)]
    shown = wrong[:MAX_WARNED_EPOCHS]
    if len(wrong) > len(shown):
        shown.append(f"{len(wrong) - len(shown)} more epochs")
    lines = "\n".join(f"- {text(line)}" for line in shown)
    says = "so it is not shown that each sample was trained on once an epoch"
    return f"**The ledger is not clean**, {says}:\n\n{lines}"


def _ledger_lines(ledger: LedgerReport | None) -> str:
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
    return "\n".join(shown) + ending


def _without_number(epoch: EpochLedger) -> EpochLedger:
    return epoch.model_copy(update={"epoch": 0}) if epoch.is_clean else epoch


def _group_line(epochs: Sequence[EpochLedger]) -> str:
    first, last = epochs[0], epochs[-1]
    if first is last:
        return str(first)
    return f"epochs {first.epoch} to {last.epoch}: {str(first).partition(': ')[2]}"


def _failure_table(failures: Sequence[FailedAttempt]) -> str:
    lines = []
    for one in failures[-MAX_FAILURES:]:
        step = "" if one.step is None else count(one.step)
        lines.append([str(one.attempt), str(one.world_size or ""), step, text(one.summary)])
    return table(["attempt", "ranks", "step", "failure"], lines, align="rrrl") if lines else ""
