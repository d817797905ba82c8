"""A regression's scores: MAE, RMSE and R², exact over all ranks."""

import math

import torch

from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.rank.evaluation.totals import non_finite, refuse_nothing, summed
from prefect_torch_ddp.rank.link import current_link
from prefect_torch_ddp.results import Report

ROUNDING = 1e-14
"""Of a mean in float64: targets that are closer to theirs are all the same."""


class RegressionMeter:
    """Measure errors on this rank; combine them exactly over all ranks.

    Only `report` communicates, so ranks may update any number of times, also never.
    """

    def __init__(self, num_outputs: int = 1) -> None:
        """Start from zero; a sample has so many values."""
        if num_outputs < 1:
            msg = f"num_outputs is {num_outputs}; a sample has one value at least"
            raise InvalidParamsError(msg)
        self.num_outputs = num_outputs
        self._num = 0
        self._non_finite = torch.zeros((), dtype=torch.int64, device="cpu")
        # By output. The targets' mean and squared distance from it, instead of plain sums: far
        # from zero those would cancel each other out.
        self._absolute, self._squared, self._mean, self._spread = torch.zeros(
            4, num_outputs, dtype=torch.float64, device="cpu"
        )

    @torch.no_grad()
    def update(self, predictions: torch.Tensor, targets: torch.Tensor) -> None:
        """Measure one batch; it may be empty.

        Args:
            predictions: shape [batch, num_outputs], or [batch] where that is 1; a nan or
                infinite one is counted, and leaves the report without scores.
            targets: of the same shape.

        Raises:
            InvalidParamsError: the shapes are others, or a target is nan or infinite.
        """
        current_link().heartbeat.progress(arms=False)
        expected = [(self.num_outputs,), ()] if self.num_outputs == 1 else [(self.num_outputs,)]
        is_batch = targets.dim() > 0 and targets.shape[1:] in expected
        if predictions.shape != targets.shape or not is_batch:
            one = " or [batch]" if self.num_outputs == 1 else ""
            msg = (
                f"predictions has shape {list(predictions.shape)} and targets "
                f"{list(targets.shape)}; both must have [batch, {self.num_outputs}]{one}"
            )
            raise InvalidParamsError(msg)
        if not len(targets):
            return
        found = predictions.double().reshape(-1, self.num_outputs)
        true = targets.to(found.device).double().reshape(-1, self.num_outputs)
        if not true.isfinite().all():
            num = int((~true.isfinite()).sum())
            msg = f"{num} targets of a batch are nan or infinite; leave such samples out"
            raise InvalidParamsError(msg)
        device = found.device
        self._non_finite = self._non_finite.to(device) + (~found.isfinite()).sum()
        self._absolute = self._absolute.to(device) + (found - true).abs().sum(0)
        self._squared = self._squared.to(device) + (found - true).square().sum(0)
        # Two sets' means and spreads merged: Chan, Golub, LeVeque, 1979.
        num, mean = self._num + len(true), true.mean(0)
        apart = mean - self._mean.to(device)
        spread = (true - mean).square().sum(0) + apart.square() * self._num * len(true) / num
        self._spread = self._spread.to(device) + spread
        self._mean = self._mean.to(device) + apart * len(true) / num
        self._num = num

    def report(self) -> Report:
        """Return the report over the samples of all ranks, each of which must call it.

        It is the same on all ranks. Its metrics are `mae`, `rmse` and `r2`, as scikit-learn
        defines them: the mean over the outputs. R² is left out where an output's targets are all
        the same. With a prediction that was nan or infinite there is
        `non_finite_predictions` instead, their number.

        Raises:
            InvalidParamsError: no rank counted a sample; raised on every rank.
        """
        sums = torch.stack([self._absolute, self._squared, self._mean * self._num])
        counts = torch.stack([torch.tensor(self._num), self._non_finite.cpu()])
        num_samples, num_non_finite = summed(counts).tolist()
        refuse_nothing(num_samples)
        absolute, squared, mean = summed(sums) / num_samples
        apart = self._mean - mean.to(self._mean.device)
        spread = summed(self._spread + self._num * apart.square()).to(mean.device) / num_samples
        metrics = {"mae": absolute.mean().item(), "rmse": squared.sqrt().mean().item()}
        if (spread > (ROUNDING * mean).square()).all():
            metrics["r2"] = (1 - squared / spread).mean().item()
        said = non_finite(num_non_finite, "predictions", "mae, rmse and r2")
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        return Report(num_samples=num_samples, metrics=said or finite)
