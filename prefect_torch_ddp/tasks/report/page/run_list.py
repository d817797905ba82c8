"""The list of an experiment's last runs, as Markdown."""

from collections.abc import Sequence

from prefect_torch_ddp.records.run_record import RunRecord
from prefect_torch_ddp.records.score import score_of
from prefect_torch_ddp.tasks.report.markdown import code, duration, number, short, table
from prefect_torch_ddp.tasks.report.page.links import Links

MAX_RUNS = 20
MAX_COMMIT = 10


def render_runs(records: Sequence[RunRecord], links: Links) -> str:
    """Lay out the last runs of an experiment, a row each.

    Args:
        records: of one experiment, newest first, at least one.
        links: where the rows lead.
    """
    rows = []
    for record in records[:MAX_RUNS]:
        score = score_of(record)
        commit = (record.commit or "")[:MAX_COMMIT] + "-dirty" * record.is_dirty
        took = "" if record.duration_s is None else duration(record.duration_s)
        rows.append(
            [
                links.run(record),
                record.state,
                "" if score is None else f"{short(score[0])} {number(score[1])}",
                f"{record.began:%Y-%m-%d %H:%M}",
                took,
                code(commit),
            ]
        )
    header = ["run", "state", "score", "began (UTC)", "took", "commit"]
    return f"# Runs of {short(records[0].experiment)}\n\n{table(header, rows, align='llllrl')}\n"
