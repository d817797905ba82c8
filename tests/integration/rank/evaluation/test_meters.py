"""Every meter over real gloo ranks: the scores of the whole, however the samples are shared."""

import os

import numpy as np
import pytest
import torch
from sklearn.metrics import mean_absolute_error, r2_score, root_mean_squared_error

from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.rank.evaluation.classification import ClassificationMeter
from prefect_torch_ddp.rank.evaluation.meters import LanguageMeter, RegressionMeter
from prefect_torch_ddp.results import Report
from tests.support.ranks import run_ranks

SHARES = [(1, 2, 0, 2), (0, 7, 1, 0), (0, 0, 0, 1), (1, 0, 0, 0), (40, 3, 17, 0), (0, 0, 0, 0)]
"""Samples of each of four ranks; with fewer, the last one has the rest."""
NAMES = tuple("abcd")


def samples(num: int) -> dict[str, torch.Tensor]:
    """Draw all samples of a case; every rank draws the same."""
    random = torch.Generator().manual_seed(num)
    return {
        # Far from zero, by float32's standards, and each rank's share around another mean.
        "true": 1e5 + torch.randn(num, generator=random).double() + torch.arange(num) / 10,
        "noise": torch.randn(num, generator=random).double(),
        "losses": torch.rand(num, generator=random).double(),
        "classes": (classes := torch.randint(0, 4, (num,), generator=random)),
        "predicted": (classes + (torch.arange(num) % 5 == 4)) % 4,  # each fifth one wrongly
        "images": torch.randint(0, 256, (num, 1, 4, 4), generator=random).byte(),
    }


def measure(shares: list[tuple[int, ...]]) -> list[list[Report | str]]:
    """Measure this rank's share of each case with every meter."""
    rank, world_size, found = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), []
    for of_four in shares:
        share = (*of_four[: world_size - 1], sum(of_four[world_size - 1 :]))
        own = slice(sum(share[:rank]), sum(share[: rank + 1]))
        part = {name: values[own] for name, values in samples(sum(share)).items()}
        regression, language = RegressionMeter(), LanguageMeter()
        classification = ClassificationMeter(NAMES)
        # A rank without samples doesn't even update, in half of the cases.
        if share[rank] or rank == 0:
            regression.update(part["true"] + part["noise"], part["true"])
            language.update(part["losses"], part["classes"])
            predicted = part["predicted"], part["classes"], part["losses"], part["images"]
            classification.update(*predicted)
        for meter in (regression, language, classification):
            try:
                found.append(meter.report())
                assert meter.report() == found[-1], "a report doesn't change what it counts"
            except InvalidParamsError as error:
                found.append(str(error))
    return found


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_every_meter_is_exact_however_the_samples_are_shared(world_size: int) -> None:
    """Uneven shares, ranks without any, none at all: each rank returns the scores of the whole,
    or the same error."""
    first, *others = run_ranks(measure, world_size, SHARES)
    assert others == [first] * (world_size - 1)
    for share, (regression, language, classification) in zip(
        SHARES, zip(*[iter(first)] * 3, strict=True), strict=True
    ):
        if not sum(share):
            assert all("nothing was evaluated" in one for one in (regression, language))
            assert "nothing was evaluated" in classification
            continue
        whole = samples(sum(share))
        true, predicted = whole["true"].numpy(), (whole["true"] + whole["noise"]).numpy()
        expected = {
            "mae": mean_absolute_error(true, predicted),
            "rmse": root_mean_squared_error(true, predicted),
            **({"r2": r2_score(true, predicted)} if sum(share) > 1 else {}),
        }
        assert regression.metrics == pytest.approx(expected, rel=1e-9)
        num_wrong = sum(share) // 5  # of 5 samples 0.8 are right, exactly
        assert classification.accuracy == (sum(share) - num_wrong) / sum(share)
        assert sum(map(sum, classification.confusion_matrix)) == sum(share)
        mean = whole["losses"].mean().item()
        assert (language.loss, classification.loss) == pytest.approx((mean, mean), rel=1e-12)
        assert language.metrics["perplexity"] == pytest.approx(np.exp(mean))
        worst = [sample.loss for sample in classification.worst_samples]
        assert worst == sorted(whole["losses"].tolist(), reverse=True)[:8]
        assert len({sample.image for sample in classification.worst_samples}) == len(worst)
