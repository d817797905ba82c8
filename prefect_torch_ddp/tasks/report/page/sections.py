"""The page of a run, live and as the final record: one function, one list of sections."""

from collections.abc import Callable, Mapping, Sequence
from urllib.parse import urlsplit

from prefect_torch_ddp.params import COUNTED_INTERVALS, ContextParams, TrainParams
from prefect_torch_ddp.records.run_record import AttemptRecord, flat
from prefect_torch_ddp.results import LedgerReport, Report, TrainReport
from prefect_torch_ddp.results import count as num_of
from prefect_torch_ddp.tasks.report.markdown import (
    code,
    count,
    duration,
    fact_table,
    join,
    number,
    short,
    table,
    text,
)
from prefect_torch_ddp.tasks.report.page.checkpoints import checkpoint_list, load_section
from prefect_torch_ddp.tasks.report.page.epochs import epoch_table
from prefect_torch_ddp.tasks.report.page.evaluation import (
    class_table,
    confusion_table,
    score_table,
    texts,
    worst_samples,
)
from prefect_torch_ddp.tasks.report.page.headline import (
    RunView,
    advice,
    cause,
    headline,
    standing,
)
from prefect_torch_ddp.tasks.report.page.last_and_best import best, comparison, judged_by
from prefect_torch_ddp.tasks.report.page.links import web_link
from prefect_torch_ddp.tasks.report.page.plot import left_out, render_curves
from prefect_torch_ddp.tasks.report.page.ranks import goodput_table, rank_table

MAX_PAGE_BYTES = 300_000
MAX_WARNED_EPOCHS = 3
MAX_LEDGER_LINES = 50
MAX_ATTEMPTS = 50
MAX_PARAMS = 100
MAX_VALUE = 200
MAX_HOSTS = 5
MAX_NAMES = 10
MAX_METRIC_ROWS = 100


def render_page(view: RunView) -> str:
    """Put a run's page together, whatever is known of it, in at most `MAX_PAGE_BYTES`."""
    bodies = {title: section(view) for title, section in SECTIONS.items()}
    sections = {title: body for title, body in bodies.items() if body}
    top = join(*(part(view) for part in TOP)).rstrip()

    def page() -> str:
        return join(top, *(f"## {title}\n\n{body}" for title, body in sections.items()))

    while len(page().encode()) > MAX_PAGE_BYTES and sections:
        largest = max(sections, key=lambda title: len(sections[title].encode()))
        size_kb = len(sections.pop(largest).encode()) // 1000
        top += f"\n\n*{largest}* is left out: its {size_kb} kB would make the page too large."
    return page()


def _curves(view: RunView) -> str:
    """Show the curves, and say what isn't in the picture."""
    curves, notes = view.curves, []
    if without := left_out(curves):
        names = ", ".join(map(short, without[:MAX_NAMES]))
        more = f" and {len(without) - MAX_NAMES} more" if len(without) > MAX_NAMES else ""
        notes.append(f"No room for the curves of {names}{more}: see Metrics.")
    for name, num in list(curves.holes.items())[:MAX_NAMES]:
        notes.append(f"**{short(name)} is nan or infinite in {count(num)} records.**")
    if len(curves.holes) > MAX_NAMES:
        notes.append(f"So are {len(curves.holes) - MAX_NAMES} more metrics.")
    picture = render_curves(curves) if view.picture is None else view.picture
    return "\n\n".join(part for part in (picture, *notes) if part)


def _locations(view: RunView) -> str:
    """Say where the model and the lines of the ranks are."""
    found = view.train_report
    uris = view.record.model_uris if found is None else found.training.model_uris
    locations = [
        f"**Model** {code(name)}: {view.links.location(uri)}" for name, uri in uris.items()
    ]
    locations = [each.replace(" `model`:", ":") for each in locations[:MAX_NAMES]]
    saved = view.record.checkpoint
    if not uris and saved is not None:
        at = f"**Newest checkpoint**, step {count(saved.step)}"
        locations.append(f"{at}: {view.links.location(saved.uri)}")
    if view.logs:
        locations.append(f"**Logs**: {view.links.location(f'{view.logs}/')}")
    if view.links.root:
        locations.append(f"[The last runs of this experiment]({view.links.runs(view.record)})")
        if url := view.links.in_ui(view.record):
            locations.append(f"[The run in Prefect]({url})")
    return "\n".join(f"- {each}" for each in locations)


def _trouble(view: RunView) -> str:
    return f"**{text(trouble)}**" if (trouble := view.training.trouble) else ""


def _facts(view: RunView) -> str:
    training = view.training
    facts = {
        "Run": code(view.record.run_id),
        "World size": f"{training.world_size} ranks" if training.world_size else "",
        "Attempt": str(training.attempt),
        "Checkpoints": _when_saved(view),
        "Elapsed": "" if view.elapsed_s is None else duration(view.elapsed_s),
        "Updated": text(view.updated_at),
        # A run's own cluster ends with the run.
        "Dask dashboard": _dashboard(view) if training.status == "training" else "",
    }
    return fact_table(facts)


def _dashboard(view: RunView) -> str:
    shown, tunnel = web_link(view.dashboard), view.dashboard_tunnel
    if not tunnel:
        return shown
    port = urlsplit(view.dashboard).port
    return f"{shown}; from another machine {code(tunnel)}, then `http://localhost:{port}/status`"


def _when_saved(view: RunView) -> str:
    """Say what makes a checkpoint due: whichever comes first."""
    policy, every_s = view.record.parameters.get("checkpoint"), view.training.checkpoint_every_s
    given = {} if not isinstance(policy, Mapping) else policy
    whens = []
    for name, unit in COUNTED_INTERVALS.items():
        if isinstance(every := given.get(name), int):
            whens.append(f"every {unit}" if every == 1 else f"every {count(every)} {unit}s")
    by_time = "" if every_s is None else f"by time, every {duration(every_s)}"
    return "; ".join([*whens, *filter(None, [by_time])])


def _metrics(view: RunView) -> str:
    curves, last = view.curves.values, view.curves.last
    names = list(dict.fromkeys([*curves, *last]))
    rows = []
    for name in names[:MAX_METRIC_ROWS]:
        cells = [number(last[name]) if name in last else "", "", ""]
        if curve := curves.get(name):
            low, high = (each(curve, key=lambda point: point[1]) for each in (min, max))
            of = [f"{number(value)} (step {count(round(step))})" for step, value in (low, high)]
            cells = [cells[0] or number(curve[-1][1]), *of]
        rows.append([short(name), *cells])
    num_left_out, mean_of = len(names) - len(rows), view.curves.steps_per_point
    endings = [f"{num_left_out} more metrics are left out."] if num_left_out else []
    if mean_of > 1:  # a step's own value, which a mean hides, may be lower or higher
        endings.append(
            f"Lowest and highest are taken from means over {mean_of} steps, like the curves."
        )
    header = ["metric", "last", "lowest", "highest"]
    return "\n\n".join([table(header, rows), *endings]) if rows else ""


def _params(view: RunView) -> str:
    """Show parameters that aren't at their defaults, then options and arguments."""
    record = view.record
    kind = TrainParams if record.is_of_flow else ContextParams
    usual = dict(flat(kind.model_construct().model_dump(mode="json")))
    ours = [(name, value) for name, value in flat(record.parameters) if value != usual.get(name)]
    named = {"options": record.options, "data_options": record.data_options}
    # An argument may be called as one of ours: both are shown.
    given = [*ours, *flat(named), *flat(record.arguments)]
    rows = [[short(name), code(_cut(value))] for name, value in given if value not in (None, "")]
    if len(rows) > MAX_PARAMS:
        rows[MAX_PARAMS:] = [["...", f"{len(rows) - MAX_PARAMS} more"]]
    return table(["what", "value"], rows, align="ll") if rows else ""


def _cut(value: object, most: int = MAX_VALUE) -> str:
    shown = "" if value is None else str(value)
    return shown if len(shown) <= most else f"{shown[:most]} ..."


def _run_record(view: RunView) -> str:
    record = view.record
    dataset, steps, versions = record.dataset, record.num_steps, dict(record.versions)
    epochs = f" in {num_of(record.num_epochs, 'epoch')}" if record.num_epochs else ""
    ours = versions.pop("prefect-torch-ddp", "")
    resumed = None if view.train_report is None else view.train_report.training.resumed_from_step
    facts = {
        "run": code(record.run_id),
        "workload": code(record.workload),
        "git commit": code(f"{record.commit}{'-dirty' * record.is_dirty}" if record.commit else ""),
        "code": f"prefect-torch-ddp {text(ours)}" if ours else "",
        **{text(name): text(value) for name, value in versions.items()},
        "seed": str(record.seed),
        "split": text(", ".join(f"{name} {count(num)}" for name, num in record.split.items())),
        "steps": f"{count(steps)}{epochs}" if steps else "",
        "resumed from": "" if resumed is None else f"step {count(resumed)}",
    }
    if dataset is not None:
        facts |= {
            "dataset": f"{count(dataset.num_files)} files, {count(dataset.num_bytes)} bytes",
            "dataset digest": code(dataset.digest),
            "dataset location": code(dataset.uri),
        }
    return fact_table(facts)


def _attempts(attempts: Sequence[AttemptRecord]) -> str:
    rows = []
    for one in attempts[-MAX_ATTEMPTS:]:
        hosts = list(dict.fromkeys(one.hosts))
        on = ", ".join(hosts[:MAX_HOSTS]) + (" ..." if len(hosts) > MAX_HOSTS else "")
        took = "" if one.ended is None else duration((one.ended - one.began).total_seconds())
        step = "" if one.step is None else count(one.step)
        rows.append(
            [str(one.attempt), str(one.world_size or ""), text(on), took, step, text(one.cause)]
        )
    header = ["attempt", "ranks", "hosts", "took", "last step", "cause"]
    return table(header, rows, align="rrlrrl") if rows else ""


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
    lines = str(ledger).splitlines()
    num_left_out = max(0, len(lines) - MAX_LEDGER_LINES)
    shown = [f"- {text(line)}" for line in lines[num_left_out:]]
    if num_left_out:
        shown.insert(0, f"- the first {num_left_out} lines are left out")
    sizes = ", ".join(f"{attempt} ({size} ranks)" for attempt, size in ledger.attempts.items())
    ending = f"\n\nBy the useful steps, of attempt {sizes}." if sizes else ""
    return "\n".join(shown) + ending


def _of_train_report(section: Callable[[TrainReport], str]) -> Callable[[RunView], str]:
    return lambda view: "" if view.train_report is None else section(view.train_report)


def _compared(section: Callable[[Report, Report | None], str]) -> Callable[[RunView], str]:
    def shown(view: RunView) -> str:
        then = view.previous.evaluation if view.previous is not None else None
        return "" if view.train_report is None else section(view.train_report.evaluation, then)

    return shown


def _models(view: RunView) -> str:
    load = "" if view.train_report is None else load_section(view.train_report.training.model_uris)
    return join(checkpoint_list(view.train_report, view.checkpoints), load).strip()


def _epochs(view: RunView) -> str:
    rows = view.epochs if view.train_report is None else view.train_report.epochs
    return epoch_table(rows, judged_by(view)) or view.without_epochs


TOP: Sequence[Callable[[RunView], str]] = (
    headline,
    standing,
    cause,
    advice,
    _trouble,
    _of_train_report(lambda report: _ledger_warning(report.ledger)),
    best,
    comparison,
    _locations,
    _curves,
    _facts,
)
"""What stands above the sections: what somebody who is called needs comes first."""
SECTIONS: Mapping[str, Callable[[RunView], str]] = {
    "Metrics": _metrics,
    "Epochs": _epochs,
    "Evaluation": _compared(score_table),
    "Classes": _compared(class_table),
    "Confusion matrix": _of_train_report(lambda report: confusion_table(report.evaluation)),
    "Worst samples": _of_train_report(lambda report: worst_samples(report.evaluation)),
    "Texts": _of_train_report(lambda report: texts(report.evaluation)),
    "Model and checkpoints": _models,
    "Ledger": _of_train_report(lambda report: _ledger_lines(report.ledger)),
    "Ranks": lambda view: rank_table(view.ranks),
    "Where the time went": lambda view: goodput_table(view.goodput),
    "Attempts": lambda view: _attempts(view.record.attempts),
    "Parameters and options": _params,
    "Run record": _run_record,
}
"""The sections of a page by title, in their order; an empty one is left out."""
