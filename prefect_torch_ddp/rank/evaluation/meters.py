"""Scores of regressions and language models, and the totals over all ranks that meters share."""

import logging
import math
import os

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.lazy import exported_by
from prefect_torch_ddp.rank.link import current_link
from prefect_torch_ddp.results import Report

ROUNDING = 1e-14
"""Of a mean in float64: targets that are closer to theirs are all the same."""
LARGEST_LOSS = 700.0
"""Beyond it the perplexity is no float."""

logger = logging.getLogger(__name__)


@exported_by("prefect_torch_ddp")
class RegressionMeter:
    """Measure errors on this rank; combine them exactly over all ranks.

    Only `report` communicates, so each rank may call `update` any number of times, or never.

    Example:
        In `evaluate`, each rank with its share of the held-out data:

            from prefect_torch_ddp import RegressionMeter

            meter = RegressionMeter()
            for inputs, targets in held_out:
                meter.update(regression(inputs), targets)
            print(meter.report().metrics["rmse"])
    """

    def __init__(self, num_outputs: int = 1) -> None:
        """Start from zero; each sample has `num_outputs` values."""
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
            predictions: shape [batch, num_outputs], or [batch] if that is 1; a nan or
                infinite one is counted, and leaves the report without scores.
            targets: of the same shape.

        Raises:
            InvalidParamsError: the shapes don't fit together, or a target is nan or infinite.
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
        defines them: the mean over the outputs. R² is left out if an output's targets are all
        the same. If a prediction was nan or infinite, the report has only
        `non_finite_predictions`, the number of such predictions.

        Raises:
            InvalidParamsError: no rank counted a sample; raised on every rank.
        """
        sums = torch.stack([self._absolute, self._squared, self._mean * self._num])
        counts = torch.stack([torch.tensor(self._num, device="cpu"), self._non_finite.cpu()])
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


@exported_by("prefect_torch_ddp")
class LanguageMeter:
    """Sum up the loss of each token on this rank; average it exactly over all ranks.

    Every token weighs the same, however long its sequence and however many a rank has. Only
    `report` communicates, so each rank may call `update` any number of times, or never.

    Example:
        In `evaluate`, with the next tokens as targets:

            from prefect_torch_ddp import LanguageMeter

            meter = LanguageMeter()
            for tokens in texts:
                meter.update(language_model(tokens[:, :-1]), tokens[:, 1:])
            print(meter.report().metrics["perplexity"])
    """

    def __init__(self, *, ignore_index: int = -100) -> None:
        """Start from zero; targets of that value, such as padding, don't count."""
        self.ignore_index = ignore_index
        self._num_samples = 0
        self._counts = torch.zeros(2, dtype=torch.int64, device="cpu")
        """Tokens, and those whose loss is nan or infinite."""
        self._loss_sum = torch.zeros((), dtype=torch.float64, device="cpu")

    @torch.no_grad()
    def update(self, logits: torch.Tensor, targets: torch.Tensor) -> None:
        """Count one batch; it may be empty.

        Args:
            logits: scores of each next token, shape [..., vocabulary], floating; or each
                token's own loss in nats, in the shape of the targets.
            targets: true tokens, shape [batch, ...], integer.

        Raises:
            InvalidParamsError: the shapes don't fit together, or a token is out of range.
        """
        current_link().heartbeat.progress(arms=False)
        has_scores = logits.dim() == targets.dim() + 1
        if (
            targets.shape != (logits.shape[:-1] if has_scores else logits.shape)
            or not targets.dim()
        ):
            msg = (
                f"logits has shape {list(logits.shape)} and targets {list(targets.shape)}; "
                "logits must have that of the targets and, unless it is each token's own loss, "
                "the vocabulary as its last dimension"
            )
            raise InvalidParamsError(msg)
        if targets.is_floating_point() or not logits.is_floating_point():
            kinds = f"logits has dtype {logits.dtype} and targets {targets.dtype}"
            msg = f"{kinds}; expected floating scores or losses, and integer tokens"
            raise InvalidParamsError(msg)
        targets = targets.to(logits.device).long()
        counted = targets != self.ignore_index
        losses = logits
        if has_scores:
            vocabulary = logits.shape[-1]
            if (((targets < 0) | (targets >= vocabulary)) & counted).any():
                outside = f"targets has a token outside 0 to {vocabulary - 1}"
                msg = f"{outside} that is not ignore_index={self.ignore_index}"
                raise InvalidParamsError(msg)
            scores, ignored = logits.reshape(-1, vocabulary).float(), self.ignore_index
            losses = cross_entropy(
                scores, targets.flatten(), ignore_index=ignored, reduction="none"
            )
        losses = losses.flatten().double()[counted.flatten()]
        counts = torch.stack([counted.sum(), (~losses.isfinite()).sum()])
        self._num_samples += len(targets)
        self._counts = self._counts.to(counts.device) + counts
        self._loss_sum = self._loss_sum.to(losses.device) + losses.sum()

    def report(self) -> Report:
        """Return the report over the tokens of all ranks, each of which must call it.

        It is the same on all ranks: `loss` is the mean over all tokens in nats, the metrics are
        `perplexity`, its exponential, and `num_tokens`. With a token whose loss was nan or
        infinite there is `non_finite_losses` instead of loss and perplexity.

        Raises:
            InvalidParamsError: no rank counted a token; raised on every rank.
        """
        counts = torch.cat([self._counts, self._counts.new_tensor([self._num_samples])])
        num_tokens, num_non_finite, num_samples = summed(counts).tolist()
        loss = summed(self._loss_sum).item()
        refuse_nothing(num_tokens, "tokens")
        loss /= num_tokens
        metrics = {"num_tokens": num_tokens}
        metrics |= non_finite(num_non_finite, "losses", "loss and perplexity")
        is_finite = not num_non_finite and math.isfinite(loss)
        if is_finite and loss < LARGEST_LOSS:
            metrics["perplexity"] = math.exp(loss)
        return Report(num_samples=num_samples, loss=loss if is_finite else None, metrics=metrics)


def summed(value: torch.Tensor) -> torch.Tensor:
    """Return the sum over all ranks, which must all call it; on a single rank, a copy."""
    if rank_and_world_size()[1] == 1:
        return value.clone()
    # A rank that never updated still holds CPU zeros, which NCCL would refuse while its peers
    # wait.
    device = torch.device("cpu")
    if dist.get_backend() == "nccl":
        device = torch.device("cuda", torch.cuda.current_device())
    total = value.to(device, copy=True)
    dist.all_reduce(total)
    return total


def rank_and_world_size() -> tuple[int, int]:
    """Return this process's rank and the number of ranks.

    Raises:
        InvalidParamsError: there are other ranks, and no process group.
    """
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    if (num_ranks := int(os.environ.get("WORLD_SIZE", "1"))) > 1:
        msg = (
            f"a meter reports over all ranks, and these {num_ranks} have no process group: leave "
            "out process_group, or initialise one before the report"
        )
        raise InvalidParamsError(msg)
    return 0, 1


def refuse_nothing(num: int, what: str = "samples") -> None:
    """Raise if no rank counted anything; on every rank, since all have the same total.

    Raises:
        InvalidParamsError: it is 0.
    """
    if num == 0:
        nothing = f"nothing was evaluated: there were 0 {what} on all ranks together"
        msg = f"{nothing}; check the evaluated split"
        raise InvalidParamsError(msg)


def non_finite(num: int, what: str, left_out: str) -> dict[str, float]:
    """Return the metric that counts values that are no numbers, and warn of them once."""
    if num and rank_and_world_size()[0] == 0:
        words = "%d evaluated %s are nan or infinite; the report has no %s"
        logger.warning(words, num, what, left_out)
    return {f"non_finite_{what}": num} if num else {}
