"""What `print` and a notebook show of a result."""

from prefect_torch_ddp import Report
from tests.support.pages import LAST, MODEL, RUN, TRAINING, evaluation, report

URL = "http://127.0.0.1:4200/runs/flow-run/1?a=1&b=2"
HTML = "s3://bucket/runs/r/report.html"
FAILED = {"attempt": 1, "world_size": 4, "step": 3, "summary": "ValueError: boom\nmore"}
PRINTED = f"""\
score       accuracy 0.875, loss 0.25 on 8 samples
trained     400 steps in 10 epochs on 4 ranks
took        200.4 s
failed      1 attempt, last: ValueError: boom
run         {RUN}
model       s3://bucket/runs/r/model.pt
checkpoint  step {LAST["step"]}
report      s3://bucket/runs/r/report.html
in Prefect  {URL}
continue    TrainParams(..., resume_from="{RUN}") or: prefect-torch-ddp resume {RUN}"""


def test_a_report_prints_in_some_ten_lines() -> None:
    """The text has score, steps, time, model, the place in Prefect, and how to continue."""
    training = {**TRAINING, "failures": (FAILED,), "model_uris": MODEL}
    assert str(report(training=training, flow_run_url=URL, report_uri=HTML)) == PRINTED


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
