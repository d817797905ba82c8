"""What the name of a metric says."""

import pytest

from prefect_torch_ddp.protocol.metric_names import direction, is_validation, quantity

HIGHER = """
val_acc val_map val_mAP50 val_mAP val/mAP val_kappa val_mcc val_psnr val_ssim val_ndcg val_mrr
val_hit_rate val_spearman val_pearson_corr val_exact_match val_reward val_return val_em
val_sensitivity val_specificity val_jaccard val_elbo val_r_squared val_win_rate val_pass_at_1
val_correct val_log_likelihood top1 valAccuracy F1 R2 mIoU dice bleu score
val_true_negative_rate negative_predictive_value neg_mean_squared_error neg_log_loss
test_neg_root_mean_squared_error neg_brier_score
"""
LOWER = """
loss val_loss val_top1_error val_top5_err val_brier_score val_fid_score val_error val_rmse
val_perplexity val_wer val_crps val_accel_error val_map_error val_inaccuracy val_recall_error
val_anomaly_score_mse val_precision_gap val_face_error val_acc_error negative_log_likelihood nll
neg_log_likelihood val_negative_log_likelihood false_negative_rate negative_mse
"""
UNKNOWN = """
lr speed val_oddness temperature accelerate mapping entropy epoch neg_loss neg_acc negative_elbo
negative_recall
"""


@pytest.mark.parametrize("name", HIGHER.split())
def test_a_score_is_better_when_higher(name: str) -> None:
    """However its words are joined."""
    assert direction(name) == "max"


@pytest.mark.parametrize("name", LOWER.split())
def test_an_error_is_better_when_lower(name: str) -> None:
    """A word for an error beats a word for a score."""
    assert direction(name) == "min"


@pytest.mark.parametrize("name", UNKNOWN.split())
def test_a_name_that_does_not_say_has_no_direction(name: str) -> None:
    """Nothing is guessed."""
    assert direction(name) is None


VALIDATION = """
val_loss val/loss val.loss val-loss valid/acc valid_loss eval/loss test/acc validation/loss valLoss
val dev_loss holdout_loss loss/val loss_val evaluation_loss
"""


@pytest.mark.parametrize("name", [*VALIDATION.split(), "Val Loss"])
def test_held_out_data_is_named_first_or_last(name: str) -> None:
    """By any separator, or a capital letter."""
    assert is_validation(name)


@pytest.mark.parametrize(
    "name", ["valuation_gap", "validity", "loss", "train/loss", "testosterone", "a_val_b"]
)
def test_a_word_that_only_begins_so_is_not_held_out_data(name: str) -> None:
    """Words are compared whole."""
    assert not is_validation(name)


def test_a_quantity_is_a_metric_without_its_split() -> None:
    """Whichever way its name says that."""
    measures = {
        "validation_loss": "loss",
        "Loss": "loss",
        "eval/accuracy": "accuracy",
        "mae-test": "mae",
        "validation": "validation",
        "trainable": "trainable",
        "test_": "test_",
        "learning_rate of optimizer[1]": "learning rate",
    }
    assert {metric: quantity(metric) for metric in measures} == measures
