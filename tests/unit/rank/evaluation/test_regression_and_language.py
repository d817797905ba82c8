"""The meters of regressions and language models: scikit-learn's numbers, by any batches."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import mean_absolute_error, r2_score, root_mean_squared_error
from torch.nn.functional import cross_entropy

from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.rank.evaluation.meters import LanguageMeter, RegressionMeter


@settings(deadline=None, max_examples=50)
@given(
    sizes=st.lists(st.integers(0, 20), min_size=1, max_size=5),
    num_outputs=st.integers(1, 3),
    far=st.sampled_from([0.0, 1e6, -1e9]),
    seed=st.integers(0, 99),
)
def test_regression_scores_are_those_of_scikit_learn(
    sizes: list[int], num_outputs: int, far: float, seed: int
) -> None:
    """Any batching gives the same scores, also far from zero, where plain sums of squares fail."""
    random = np.random.default_rng(seed)
    true = far + random.standard_normal((sum(sizes), num_outputs))
    found = true + 0.3 * random.standard_normal(true.shape)
    meter = RegressionMeter(num_outputs)
    for part in np.split(np.arange(len(true)), np.cumsum(sizes)[:-1]):
        meter.update(torch.from_numpy(found[part]), torch.from_numpy(true[part]))
    if len(true) == 0:
        with pytest.raises(InvalidParamsError, match="nothing was evaluated"):
            meter.report()
        return
    report = meter.report()
    expected = {
        "mae": mean_absolute_error(true, found),
        "rmse": root_mean_squared_error(true, found),
    }
    if len(true) > 1:
        expected["r2"] = r2_score(true, found)
    assert report.num_samples == len(true)
    assert report.metrics == pytest.approx(expected, rel=1e-6)


def test_a_default_device_of_the_user_does_not_matter() -> None:
    """A meter reports under `torch.set_default_device`, with "meta" in place of a GPU."""
    meter = RegressionMeter()
    meter.update(torch.ones(4), torch.zeros(4))
    with torch.device("meta"):
        assert meter.report().metrics["rmse"] == 1


def test_r2_is_left_out_where_the_targets_are_all_the_same() -> None:
    """Also if their mean in floating point isn't quite them."""
    meter = RegressionMeter()
    meter.update(torch.full((3,), 0.2), torch.full((3,), 0.1, dtype=torch.float64))
    assert set(meter.report().metrics) == {"mae", "rmse"}


def test_predictions_that_are_no_numbers_are_counted_and_leave_no_score(caplog) -> None:
    """A model that diverged gets a report that says so; no score hides it."""
    meter = RegressionMeter()
    meter.update(torch.tensor([1.0, math.nan, math.inf]), torch.tensor([1.0, 2, 3]))
    meter.update(torch.tensor([[1.0]]), torch.tensor([[2.0]]))
    report = meter.report()
    assert (report.num_samples, report.metrics) == (4, {"non_finite_predictions": 2})
    assert "2 evaluated predictions are nan or infinite" in caplog.text


@pytest.mark.parametrize(
    ("predictions", "targets", "words"),
    [
        (torch.zeros(2, 3), torch.zeros(2, 3), r"\[2, 3\].*must have \[batch, 1\] or \[batch\]"),
        (torch.zeros(2, 1), torch.zeros(2), r"predictions has shape \[2, 1\] and targets \[2\]"),
        (torch.zeros(()), torch.zeros(()), r"predictions has shape \[\]"),
        (torch.zeros(2), torch.tensor([0.0, math.nan]), "1 targets of a batch are nan"),
    ],
)
def test_a_regression_that_does_not_fit_is_refused(predictions, targets, words) -> None:
    """Never broadcast to a wrong number."""
    with pytest.raises(InvalidParamsError, match=words):
        RegressionMeter().update(predictions, targets)


def test_each_token_weighs_the_same_however_long_its_sequence() -> None:
    """Padding doesn't count; batches of one long and of many short sequences give the mean over
    all tokens, by logits as by losses."""
    random = torch.Generator().manual_seed(0)
    logits, targets = torch.randn(7, 5, 11, generator=random), torch.randint(0, 11, (7, 5))
    targets[2:, 3:] = -100
    targets[6] = -100
    by_logits, by_losses = LanguageMeter(), LanguageMeter()
    losses = cross_entropy(logits.permute(0, 2, 1), targets, reduction="none")
    for part in (slice(0, 1), slice(1, 1), slice(1, 6), slice(6, 7)):
        by_logits.update(logits[part], targets[part])
        by_losses.update(losses[part], targets[part])
    expected = cross_entropy(logits.flatten(0, 1).double(), targets.flatten()).item()
    report = by_logits.report()
    assert report.loss == pytest.approx(expected, rel=1e-6)
    assert report.metrics == pytest.approx({"num_tokens": 22, "perplexity": math.exp(expected)})
    assert report.num_samples == 7
    assert by_losses.report().loss == pytest.approx(expected, rel=1e-6)


def test_losses_that_are_no_numbers_leave_no_perplexity(caplog) -> None:
    """A loss that isn't finite, or too large, gives no perplexity, and the report is valid JSON."""
    diverged, large = LanguageMeter(ignore_index=0), LanguageMeter()
    diverged.update(torch.tensor([math.nan, 1.0, math.inf, math.nan]), torch.tensor([1, 1, 1, 0]))
    large.update(torch.tensor([800.0]), torch.tensor([1]))
    assert diverged.report().loss is None
    assert diverged.report().metrics == {"num_tokens": 3, "non_finite_losses": 2}
    assert (large.report().loss, large.report().metrics) == (800.0, {"num_tokens": 1})
    assert "2 evaluated losses are nan or infinite" in caplog.text


@pytest.mark.parametrize(
    ("logits", "targets", "words"),
    [
        (torch.zeros(2, 3), torch.zeros(3).long(), r"logits has shape \[2, 3\] and targets \[3\]"),
        (torch.zeros(2, 3), torch.zeros(2), "floating scores or losses, and integer tokens"),
        (torch.zeros(2).long(), torch.zeros(2).long(), "floating scores or losses"),
        (torch.zeros(2, 3), torch.tensor([0, 3]), "targets has a token outside 0 to 2"),
        (torch.zeros(3), torch.tensor(0), "logits must have that of the targets"),
    ],
)
def test_tokens_that_do_not_fit_are_refused(logits, targets, words) -> None:
    """A wrong shape or token is named."""
    with pytest.raises(InvalidParamsError, match=words):
        LanguageMeter().update(logits, targets)


def test_nothing_but_padding_is_an_error() -> None:
    """Never 0/0."""
    meter = LanguageMeter()
    meter.update(torch.zeros(1, 2, 3), torch.full((1, 2), -100))
    with pytest.raises(InvalidParamsError, match="there were 0 tokens on all ranks"):
        meter.report()
