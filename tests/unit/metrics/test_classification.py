"""The report of a confusion matrix: hand-computed scores, never nan, always square."""

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import precision_recall_fscore_support

from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.rank.evaluation import classification_report


def test_scores_by_hand() -> None:
    """D3: rows are true classes: cat 3 of 4 found; what is called dog is right in 2 of 3."""
    report = classification_report([[3, 1], [0, 2]], ["cat", "dog"], loss=0.25)
    assert (report.num_samples, report.accuracy, report.loss) == (6, 5 / 6, 0.25)
    cat, dog = report.classes
    assert (cat.name, cat.precision, cat.recall, cat.support) == ("cat", 1.0, 0.75, 4)
    assert (dog.name, dog.precision, dog.recall, dog.support) == (
        "dog",
        pytest.approx(2 / 3),
        1.0,
        2,
    )
    assert cat.f1 == pytest.approx(6 / 7)
    assert dog.f1 == pytest.approx(0.8)
    assert report.confusion_matrix == ((3, 1), (0, 2))


def test_classes_never_predicted_or_absent_score_zero() -> None:
    """D3: class b is never predicted, class c is absent (and predicted once), class d is
    both."""
    report = classification_report(
        [[2, 0, 1, 0], [3, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]], "abcd", loss=None
    )
    assert [
        (score.precision, score.recall, score.f1, score.support) for score in report.classes[1:]
    ] == [
        (0, 0, 0, 3),
        (0, 0, 0, 0),
        (0, 0, 0, 0),
    ]
    assert report.loss is None


@settings(deadline=None)
@given(
    st.integers(1, 6).flatmap(
        lambda n: st.lists(
            st.lists(st.integers(0, 9), min_size=n, max_size=n), min_size=n, max_size=n
        )
    )
)
def test_scores_are_those_of_scikit_learn(matrix: list[list[int]]) -> None:
    """They are scikit-learn's, never nan or inf, on which Prefect's page crashes."""
    total = sum(map(sum, matrix))
    names = [f"class {i}" for i in range(len(matrix))]
    if total == 0:
        with pytest.raises(InvalidParamsError, match="nothing was evaluated"):
            classification_report(matrix, names)
        return
    report = classification_report(matrix, names, loss=1.0)
    assert report.num_samples == total == sum(score.support for score in report.classes)
    right = sum(score.recall * score.support for score in report.classes)
    assert report.accuracy == pytest.approx(right / total)
    cells = [(i, j, count) for i, row in enumerate(matrix) for j, count in enumerate(row)]
    targets, predictions, counts = zip(*cells, strict=True)
    expected = precision_recall_fscore_support(
        targets, predictions, sample_weight=counts, labels=range(len(matrix)), zero_division=0
    )
    found = [(each.precision, each.recall, each.f1, each.support) for each in report.classes]
    for scores, right in zip(zip(*found, strict=True), expected, strict=True):
        assert scores == pytest.approx(right.tolist(), rel=1e-12)


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_no_number_is_none(loss: float) -> None:
    """A diverged model still gets its report."""
    assert classification_report([[1]], ["a"], loss).loss is None


@pytest.mark.parametrize(
    ("matrix", "words"),
    [
        ([[1, 2]], r"got rows of \[2\]"),
        ([[1], [2]], "2 rows of 2 counts"),
        ([[1, -1], [0, 0]], "negative"),
    ],
)
def test_misshapen_matrices_are_refused(matrix: list[list[Any]], words: str) -> None:
    """The message says what a matrix looks like."""
    with pytest.raises(InvalidParamsError, match=words):
        classification_report(matrix, ["a", "b"])
