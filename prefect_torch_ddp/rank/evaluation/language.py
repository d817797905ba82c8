"""A language model's scores: loss and perplexity by token, exact over all ranks."""

import math

import torch
from torch.nn.functional import cross_entropy

from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.rank.evaluation.totals import non_finite, refuse_nothing, summed
from prefect_torch_ddp.rank.link import current_link
from prefect_torch_ddp.results import Report

LARGEST_LOSS = 700.0
"""Beyond it the perplexity is no float."""


class LanguageMeter:
    """Sum up the loss of each token on this rank; average it exactly over all ranks.

    Every token weighs the same, however long its sequence and however many a rank has. Only
    `report` communicates, so ranks may update any number of times, also never.
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
