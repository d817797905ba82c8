"""Tabular: embeddings and an MLP predict the fares of taxi trips, and who gives a tip.

Dask generates and cleans the table. The last days are held out.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, smooth_l1_loss

from flows.generated import PAYMENTS, ZONES, trips
from flows.options import TabularData, TabularTraining
from prefect_torch_ddp import (
    ClassificationMeter,
    RankContext,
    RegressionMeter,
    Report,
    read_options,
)
from prefect_torch_ddp.data import table
from prefect_torch_ddp.examples.schedules import one_cycle, renew_options

if TYPE_CHECKING:
    import dask.dataframe as dd

NUMBERS = ("distance", "passengers")
SIZES = {"zone": len(ZONES), "payment": len(PAYMENTS), "hour": 24, "weekday": 7}
"""The embedded columns, and how many values each has."""


class Options(TabularTraining, TabularData):
    """All options of a run. It needs no source."""


def prepare(ctx: RankContext) -> "dd.DataFrame":
    """Return the cleaned trips as a DataFrame that Dask computes; it is written as Parquet."""
    import dask.dataframe as dd  # noqa: PLC0415 - an extra, which only this stage needs

    options = read_options(Options, ctx.options)
    raw = dd.from_map(trips, range(options.days), seed=options.data_seed, meta=trips(0, 0)[:0])
    clean = raw[(raw["distance"] > 0) & (raw["fare"] > 0)]
    clean = clean.fillna({"passengers": 1})
    first_test = round(options.days * (1 - options.held_out))
    split: dd.DataFrame = clean.assign(is_test=clean["day"] >= first_test)
    return split


def train(ctx: RankContext) -> dict[str, int]:
    """Learn both targets at once, with AdamW on a one-cycle rate."""
    options = read_options(Options, ctx.options)
    rows = rows_of(ctx, is_test=False)
    # A rank can't normalise a single trip, which an epoch's uneven tail may leave to it.
    batch_size = min(options.global_batch_size, len(rows))
    loader = ctx.loader(rows, global_batch_size=batch_size, drop_last=True)
    model = ctx.wrap(Net(options))
    optimizer = torch.optim.AdamW(model.parameters(), options.lr)
    ctx.track(model=model, optimizer=optimizer)
    renew_options(optimizer)
    scheduler = one_cycle(
        ctx, optimizer, options.lr, epochs=options.epochs, num_batches=len(loader)
    )
    for given in ctx.steps(loader, epochs=options.epochs):
        batch = {name: values.to(ctx.device) for name, values in given.items()}
        fare, tip = model(batch)
        fare_loss = smooth_l1_loss(fare, batch["fare"])
        tip_loss = binary_cross_entropy_with_logits(tip, batch["tipped"].float())
        loss = fare_loss + tip_loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        ctx.report(loss=loss, fare_loss=fare_loss, tip_loss=tip_loss)
    return {"num_trips": len(rows)}


@torch.no_grad()
def evaluate(ctx: RankContext) -> Report:
    """Score fares (mae, rmse, r2) and tips (classes) on the days that training never saw.

    The baselines: an r2 of 0 is to guess the mean fare; `majority_accuracy` is to guess that all
    give a tip, or nobody.
    """
    options = read_options(Options, ctx.options)
    model = Net(options).to(ctx.device)
    ctx.track(model=model)
    model.eval()
    fares, tips = RegressionMeter(), ClassificationMeter(["no tip", "tip"])
    for batch in ctx.loader(rows_of(ctx, is_test=True), global_batch_size=4096, shuffle=False):
        fare, tip = model({name: values.to(ctx.device) for name, values in batch.items()})
        fares.update(fare, batch["fare"].to(ctx.device))
        tips.update(torch.stack([torch.zeros_like(tip), tip], 1), batch["tipped"])
    scores, report = fares.report(), tips.report()
    majority = max(each.support for each in report.classes) / report.num_samples
    metrics = {**scores.metrics, "majority_accuracy": majority}
    return report.model_copy(update={"metrics": {**report.metrics, **metrics}})


def rows_of(ctx: RankContext, *, is_test: bool) -> Any:
    """Return the trips of a split: a batch is a dict of tensors [rows] by column."""
    return table(
        ctx.data_storage,
        [*SIZES, *NUMBERS, "fare", "tipped"],
        categories={"zone": ZONES, "payment": PAYMENTS},
        filters=[("is_test", "==", is_test)],
    )


class Net(nn.Module):
    """A batch of trips to the fare [rows], and the logit of a tip [rows]."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        self.embeddings = nn.ModuleDict(
            {name: nn.Embedding(size, options.embedding) for name, size in SIZES.items()}
        )
        self.normalize = nn.BatchNorm1d(len(NUMBERS), affine=False)
        width = len(SIZES) * options.embedding + len(NUMBERS)
        self.body = nn.Sequential(
            nn.Linear(width, options.hidden),
            nn.GELU(),
            nn.Linear(options.hidden, options.hidden),
            nn.GELU(),
            nn.Linear(options.hidden, 2),
        )

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Predict both."""
        numbers = self.normalize(torch.stack([batch[name] for name in NUMBERS], 1))
        embedded = [each(batch[name].long()) for name, each in self.embeddings.items()]
        fare, tip = self.body(torch.cat([*embedded, numbers], 1)).unbind(1)
        return 10 * fare, tip  # fares are some 10 and more
