"""What `print` and a notebook show of a result."""

from datetime import UTC, datetime

from prefect_torch_ddp import Report
from prefect_torch_ddp.records.run_record import RunRecord
from prefect_torch_ddp.records.score import judged_values
from prefect_torch_ddp.tracking.trackers.facts import evaluated
from tests.support.pages import LAST, MODEL, RUN, TRAINING, evaluation, report

URL = "http://127.0.0.1:4200/runs/flow-run/1?a=1&b=2"
HTML = "s3://bucket/runs/r/report.html"
FAILED = {"attempt": 1, "world_size": 4, "step": 3, "summary": "ValueError: boom\nmore"}
PRINTED = f"""\
score       accuracy 0.875, loss 0.25 on 8 samples
trained     400 steps in 10 epochs on 4 ranks
took        200.4 s in attempt 2
failed      1 attempt, last: ValueError: boom
run         {RUN}
model       s3://bucket/runs/r/model.pt
checkpoint  step {LAST["step"]}
report      s3://bucket/runs/r/report.html
in Prefect  {URL}
continue    TrainParams(..., resume_from="{RUN}") or: prefect-torch-ddp resume {RUN} \
-o NAME=VALUE --storage s3://bucket"""


def test_a_report_prints_in_some_ten_lines() -> None:
    """The text has score, steps, time, model, the place in Prefect, and how to continue: by a
    command that can be typed so, for a run that has ended, in its storage."""
    training = {**TRAINING, "failures": (FAILED,), "model_uris": MODEL}
    assert str(report(training=training, flow_run_url=URL, report_uri=HTML)) == PRINTED


def test_a_report_names_the_attempt_only_if_there_were_others() -> None:
    """The time is that of the attempt that finished."""
    assert "\ntook        200.4 s\n" in str(report(training={**TRAINING, "attempt": 1}))


def test_a_notebook_shows_a_table_with_links_and_nothing_else() -> None:
    """Names can't put HTML into it."""
    hostile = evaluation(metrics={"<script>": 1.0})
    html = report(evaluation=hostile, flow_run_url=URL)._repr_html_()
    assert html.startswith("<table><tr><th>score</th><td>accuracy 0.875, loss 0.25, &lt;script&gt;")
    escaped = URL.replace("&", "&amp;")
    assert f'<a href="{escaped}">{escaped}</a>' in html
    assert html.count("<a ") == 1


def test_an_evaluation_prints_its_score_and_its_worst_class() -> None:
    """Without its matrix and its pictures."""
    assert str(Report(num_samples=1)) == "score       1 sample"
    assert str(evaluation()).splitlines()[1] == "worst class cat: F1 0.8571 of 4"


def test_a_metric_named_like_a_fixed_score_hides_it_nowhere() -> None:
    """It has a prefix beside the fixed one; without that one it keeps its name."""
    both = Report(num_samples=8, accuracy=0.75, metrics={"accuracy": 0.5, "loss": 2.0, "mae": 1.0})
    expected = {"accuracy": 0.75, "metric.accuracy": 0.5, "loss": 2.0, "mae": 1.0}
    assert both.scores == expected
    assert both.score == "accuracy 0.75, metric.accuracy 0.5, loss 2, mae 1 on 8 samples"
    names = {"run_id": "r", "experiment": "e", "workload": "w", "storage": "s"}
    record = RunRecord(**names, began=datetime.now(UTC), evaluation=both)
    assert evaluated(record) == {f"evaluation/{name}": value for name, value in expected.items()}
    assert judged_values(both) == expected
