"""The digits' options, apart from what loads torch: the form of a deployment is made of them."""

from pydantic import Field, PositiveFloat, PositiveInt

from prefect_torch_ddp import Params


class DigitsData(Params):
    """How the digits are divided."""

    held_out: float = Field(default=0.2, gt=0, lt=1)
    """Share of the images that training never sees."""
    validation: float = Field(default=0.1, gt=0, lt=1)
    """Share of the other images that only validate."""
    split_seed: int = Field(default=0, ge=0)
    """Seeds the split."""


class DigitsTraining(Params):
    """How the digits are learnt."""

    epochs: PositiveInt = 20
    """How often training goes through its images."""
    global_batch_size: PositiveInt = 64
    """Images of an optimizer step, over all ranks."""
    lr: PositiveFloat = 0.01
    """The highest learning rate of the one-cycle schedule."""
    weight_decay: float = Field(default=0.05, ge=0)
    """Weight decay of AdamW."""
    dropout: float = Field(default=0.3, ge=0, lt=1)
    """Share of the features that training drops."""
