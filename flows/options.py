"""The workloads' options, apart from what loads torch: the forms of deployments are made of them.

Data options are those that `prepare` reads. Their defaults are no part of a dataset's id, as the
code of `prepare` is; the flows of deployed.py hand on each value, which is.
"""

from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt

from prefect_torch_ddp import Params


class Cifar10Data(Params):
    """How CIFAR-10's training images are divided."""

    validation: float = Field(default=0.1, gt=0, lt=1)
    """Share of the training images that only validate."""
    split_seed: int = Field(default=0, ge=0)
    """Seeds the split."""


class Cifar10Training(Params):
    """How CIFAR-10 is learnt."""

    epochs: PositiveInt = 30
    """How often training goes through its images."""
    global_batch_size: PositiveInt = 128
    """Images of an optimizer step, over all ranks."""
    lr: PositiveFloat = 0.05
    """The highest learning rate of the schedule."""
    schedule: Literal["one_cycle", "constant"] = "one_cycle"
    """How the learning rate changes: up and down over all epochs, or not at all."""
    weight_decay: float = Field(default=5e-4, ge=0)
    """Weight decay of SGD."""
    num_workers: int = Field(default=0, ge=0)
    """Processes of each rank that augment images."""


class PetNamesData(Params):
    """Where the names are, and how they are divided."""

    file: str = Field(default="names.txt", min_length=1)
    """The list: UTF-8 text with a name on each line, or a .json file with a list of names. It is a
    file of the run's source, or a path, an s3:// URI or an https:// address."""
    held_out: float = Field(default=0.1, gt=0, lt=1)
    """Share of the names that training never sees."""
    split_seed: int = Field(default=0, ge=0)
    """Seeds the split."""


class PetNamesTraining(Params):
    """How names are learnt and made up."""

    epochs: PositiveInt = 30
    """How often training goes through its names."""
    global_batch_size: PositiveInt = 64
    """Names of an optimizer step, over all ranks."""
    lr: PositiveFloat = 0.005
    """The learning rate at the start; it falls to 0."""
    hidden: PositiveInt = 128
    """Size of the LSTM's state."""
    layers: PositiveInt = 2
    """Layers of the LSTM."""
    dropout: float = Field(default=0.2, ge=0, lt=1)
    """Share of the features that training drops between the LSTM's layers."""
    num_new: PositiveInt = 50
    """How many names are made up."""
    temperature: PositiveFloat = 0.8
    """Small: likely names; large: bold ones."""


class LandUseData(Params):
    """How the images of each class are divided."""

    held_out: float = Field(default=0.2, gt=0, lt=1)
    """Share of each class that training never sees."""
    split_seed: int = Field(default=0, ge=0)
    """Seeds the split."""


class LandUseTraining(Params):
    """How land use is learnt."""

    size: PositiveInt = 224
    """Pixels of a side, to which all images are brought."""
    cache: str | None = None
    """Folder of each host for what was read from S3; empty: not kept."""
    model: str = "resnet18"
    """A classifier of torchvision, see torchvision.models.list_models()."""
    weights: str | None = None
    """Weights to begin with: the path or URI of a .safetensors file."""
    epochs: PositiveInt = 30
    """How often training goes through its images."""
    global_batch_size: PositiveInt = 64
    """Images of an optimizer step, over all ranks."""
    micro_batch_size: PositiveInt | None = None
    """Images that a rank computes at a time; empty: all."""
    lr: PositiveFloat = 1e-3
    """The highest learning rate of the one-cycle schedule."""
    optimizer: Literal["adamw", "sgd"] = "adamw"
    """What makes the steps; sgd has the momentum below."""
    momentum: float = Field(default=0.9, ge=0, lt=1)
    """Momentum of SGD."""
    weight_decay: float = Field(default=0.05, ge=0)
    """Weight decay of the optimizer."""
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    """Of what may be computed in less than float32."""
    compile: str | None = None
    """Backend of torch.compile, such as inductor; empty: not compiled."""
    num_workers: int = Field(default=0, ge=0)
    """Processes of each rank that decode images."""


class GriddedData(Params):
    """Which field is generated, and how it is divided."""

    times: int = Field(default=400, ge=40)
    """Time steps of the field, one every 6 hours."""
    data_seed: int = Field(default=0, ge=0)
    """Seeds the field."""


class GriddedTraining(Params):
    """How the next time step is learnt and scored."""

    held_out: float = Field(default=0.2, ge=0.1, le=0.5)
    """Share of the time, at its end, that training never sees."""
    patch: int = Field(default=16, ge=8, le=32, multiple_of=4)
    """Grid points of a patch's side."""
    stride: int = Field(default=8, ge=1, le=32)
    """Grid points from a patch to the next one."""
    epochs: PositiveInt = 10
    """How often training goes through its patches."""
    global_batch_size: PositiveInt = 128
    """Patches of an optimizer step, over all ranks."""
    lr: PositiveFloat = 0.005
    """The highest learning rate of the one-cycle schedule."""
    channels: PositiveInt = 12
    """Channels of the U-Net at full resolution."""
    leads: int = Field(default=4, ge=1, le=12)
    """Time steps that evaluation forecasts."""


class TabularData(Params):
    """Which trips are generated, and how they are divided."""

    days: int = Field(default=60, ge=10)
    """Days with 500 trips each."""
    data_seed: int = Field(default=0, ge=0)
    """Seeds the trips."""
    held_out: float = Field(default=0.2, ge=0.1, le=0.5)
    """Share of the days, at their end, that training never sees."""


class TabularTraining(Params):
    """How fares and tips are learnt."""

    epochs: PositiveInt = 10
    """How often training goes through its trips."""
    global_batch_size: PositiveInt = 512
    """Trips of an optimizer step, over all ranks."""
    lr: PositiveFloat = 0.01
    """The highest learning rate of the one-cycle schedule."""
    embedding: PositiveInt = 8
    """Size of each embedding."""
    hidden: PositiveInt = 64
    """Size of the hidden layers."""
