"""What a metric's name says: on which data it was measured, and which of its values are better.

Names are read word by word: `val/loss`, `valLoss`, `val_top1_error`. Pure.
"""

import re
from itertools import pairwise
from typing import Literal

Direction = Literal["max", "min"]

_PART = re.compile(r"[^\W_]+")
_CAMEL = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z²]+|\d+")
_TRAINING = frozenset(["train", "training"])
_VALIDATION = frozenset(["val", "valid", "validation", "eval", "evaluation", "test", "holdout"])
_LOWER = frozenset(
    """loss losses error errors err mse rmse mae mape smape nll perplexity ppl wer cer ter fid kid
    brier crps distance divergence gap inaccuracy regret eer ece bpc bpd misses mistakes
    failures hausdorff lpips""".split()  # noqa: SIM905 - words read better
)
_HIGHER = frozenset(
    """acc accuracy f1 fbeta auc auroc auprc roc ap map precision recall r2 iou miou dice jaccard
    bleu rouge rougel meteor cider chrf score kappa mcc psnr ssim ndcg mrr hit hits spearman pearson
    kendall corr correlation em reward return returns sensitivity specificity elbo correct
    likelihood top""".split()  # noqa: SIM905 - words read better
)
_HIGHER_PAIRS = frozenset(
    [
        *["exact match", "win rate", "pass at", "r squared", "success rate", "predictive value"],
        *["true negative", "true negatives", "true positive", "true positives"],
    ]
)
_LOWER_PAIRS = frozenset(["false negative", "false negatives", "false positive", "false positives"])
_LOGS = frozenset(["negative log", "neg log"])
"""Before `likelihood`: better when lower."""
_NEGATED = frozenset("mean median root squared absolute log brier".split())  # noqa: SIM905
"""Words of the errors that scikit-learn turns around: `neg_mean_squared_error`."""


def words_of(metric: str) -> tuple[str, ...]:
    """Return the words of a name in lower case; a number at a word's end doesn't count."""
    found: list[str] = []
    for part in _PART.findall(metric):
        whole = part.lower()
        plain = whole.rstrip("0123456789")
        known = next((each for each in (whole, plain) if each in _KNOWN), None)
        split = [word.lower() for word in _CAMEL.findall(part) if not word.isdigit()]
        found += [known] if known else split
    return tuple(found)


def is_validation(metric: str) -> bool:
    """Tell whether a metric was measured on held-out data: by its first or last word."""
    words = words_of(metric)
    return bool(words) and (words[0] in {*_VALIDATION, "dev"} or words[-1] in _VALIDATION)


def quantity(metric: str) -> str:
    """Return what a metric measures, on whichever data: `loss` of `val_loss` and `train/loss`."""
    name = metric.lower()
    if name.startswith("learning_rate"):  # as measured: `learning_rate of optimizer[1]`
        return "learning rate"
    split = "|".join(sorted({*_TRAINING, *_VALIDATION}, key=len, reverse=True))
    return re.sub(rf"^({split})[_/ .-]+|[_/ .-]+({split})$", "", name) or name


def direction(metric: str) -> Direction | None:
    """Return which of a metric's values are better; None if the name doesn't say.

    A word for an error beats one for a score: `val_top1_error`, `fid_score`. A leading `neg` turns
    an error around, as in scikit-learn's names; `neg_loss` may be a loss of negative samples.
    """
    words = words_of(metric)
    while words and words[0] in {*_TRAINING, *_VALIDATION, "dev"}:
        words = words[1:]
    pairs = {f"{first} {second}" for first, second in pairwise(words)}
    is_likelihood = "likelihood" in words and bool(_LOGS & pairs)
    if words[:1] == ("neg",) and not is_likelihood:
        is_turned = _NEGATED.intersection(words) and _LOWER.intersection(words)
        return "max" if is_turned else None
    if is_likelihood or _LOWER.intersection(words) or _LOWER_PAIRS & pairs:
        return "min"
    is_known = "negative" not in words or bool(_HIGHER_PAIRS & pairs)
    is_score = bool(_HIGHER.intersection(words) or _HIGHER_PAIRS & pairs)
    return "max" if is_score and is_known else None


_KNOWN = _TRAINING | _VALIDATION | _LOWER | _HIGHER
