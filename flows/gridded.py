"""Gridded: a small U-Net predicts the next time step of a field that Dask generates as Zarr.

It is trained on patches, and scored on whole fields by lead time, next to persistence: the forecast
that nothing changes.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, interpolate, mse_loss

from flows.generated import STEP_H, time_at, weather
from flows.options import GriddedData, GriddedTraining
from prefect_torch_ddp import RankContext, RegressionMeter, Report, read_options
from prefect_torch_ddp.data import array
from prefect_torch_ddp.examples.schedules import one_cycle, renew_options

if TYPE_CHECKING:
    import xarray as xr

HISTORY = 2
"""Time steps that a forecast is made from."""


class Options(GriddedTraining, GriddedData):
    """All options of a run. It needs no source."""


def prepare(ctx: RankContext) -> "xr.Dataset":
    """Return the field as a Dataset that Dask computes; it is written as Zarr."""
    options = read_options(Options, ctx.options)
    return weather(options.times, options.data_seed)


def train(ctx: RankContext) -> dict[str, int]:
    """Learn the next time step of patches, with AdamW on a one-cycle rate."""
    options = read_options(Options, ctx.options)
    size = dict.fromkeys(("lat", "lon"), options.patch)
    samples = fields(ctx, options, "train", HISTORY + 1, size)
    fields(ctx, options, "test", HISTORY + options.leads)  # or too short a test part ends evaluate
    loader = ctx.loader(samples, global_batch_size=options.global_batch_size)
    model = ctx.wrap(UNet(options.channels))
    optimizer = torch.optim.AdamW(model.parameters(), options.lr)
    ctx.track(model=model, optimizer=optimizer)
    renew_options(optimizer)
    scheduler = one_cycle(
        ctx, optimizer, options.lr, epochs=options.epochs, num_batches=len(loader)
    )
    for batch in ctx.steps(loader, epochs=options.epochs):
        steps = batch["height"].to(ctx.device)
        loss = mse_loss(model(steps[:, :HISTORY]), steps[:, HISTORY:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        ctx.report(loss=loss)
    return {"num_patches": len(samples)}


@torch.no_grad()
def evaluate(ctx: RankContext) -> Report:
    """Forecast step by step from the model's own forecasts; score each lead time, in metres."""
    options = read_options(Options, ctx.options)
    model = UNet(options.channels).to(ctx.device)
    ctx.track(model=model)
    model.eval()
    samples = fields(ctx, options, "test", HISTORY + options.leads)
    _, std = samples.scales["height"]
    scores = [RegressionMeter() for _ in range(options.leads)]
    persistence = [RegressionMeter() for _ in range(options.leads)]
    for batch in ctx.loader(samples, global_batch_size=32, shuffle=False):
        steps = batch["height"].to(ctx.device)
        known, last = steps[:, :HISTORY], steps[:, HISTORY - 1]
        for lead in range(options.leads):
            known = torch.cat([known[:, 1:], model(known)], 1)
            true = std * steps[:, HISTORY + lead].flatten()
            scores[lead].update(std * known[:, -1].flatten(), true)
            persistence[lead].update(std * last.flatten(), true)
    metrics: dict[str, float] = {}
    for lead in range(options.leads):
        hours = STEP_H * (lead + 1)
        for prefix, meter in (("", scores[lead]), ("persistence_", persistence[lead])):
            found = meter.report().metrics
            kept = found.keys() & {"rmse", "non_finite_predictions"}
            metrics |= {f"{prefix}{name}_{hours}h": found[name] for name in sorted(kept)}
    return Report(num_samples=len(samples), metrics=metrics)


def fields(
    ctx: RankContext, options: Options, split: str, window: int, patch: dict[str, int] | None = None
) -> Any:
    """Return samples of a split: `height`, float32 [samples, window, lat, lon], normalised.

    The last part of the time is held out. No sample is in both splits.
    """
    first_test = round(options.times * (1 - options.held_out))
    part = slice(None, time_at(first_test - 1))
    if split == "test":
        part = slice(time_at(first_test), None)
    return array(
        ctx.data_storage,
        ["height"],
        window={"time": window},
        patch=patch,
        stride=dict.fromkeys(patch or (), options.stride),
        select={"time": part},
        normalize=True,
    )


class UNet(nn.Module):
    """Two time steps [n, 2, lat, lon] to the next one [n, 1, lat, lon]: how the last one changes.

    Both sides are divisible by 4. Patches have no neighbours, so all borders repeat their values.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = _block(HISTORY, channels)
        self.second = _block(channels, 2 * channels)
        self.third = _block(2 * channels, 4 * channels)
        self.fourth = _block(6 * channels, 2 * channels)
        self.fifth = _block(3 * channels, channels)
        self.change = nn.Conv2d(channels, 1, 1)

    def forward(self, steps: Tensor) -> Tensor:
        """Forecast."""
        high = self.first(steps)
        middle = self.second(avg_pool2d(high, 2))
        low = self.third(avg_pool2d(middle, 2))
        middle = self.fourth(torch.cat([interpolate(low, scale_factor=2), middle], 1))
        high = self.fifth(torch.cat([interpolate(middle, scale_factor=2), high], 1))
        change: Tensor = self.change(high)
        return steps[:, -1:] + change


def _block(given: int, made: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(given, made, 3, padding=1, padding_mode="replicate"),
        nn.GroupNorm(1, made),
        nn.GELU(),
        nn.Conv2d(made, made, 3, padding=1, padding_mode="replicate"),
        nn.GELU(),
    )
