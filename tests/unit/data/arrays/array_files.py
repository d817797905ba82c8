"""Arrays for tests, and walks over their samples on any number of ranks."""

from typing import Any

import numpy as np

from tests.unit.data.test_loader import loader_of


def weather(times: int = 20, lats: int = 8, lons: int = 6) -> Any:
    """Return a dataset of xarray whose values count through time, lat and lon."""
    import xarray as xr

    shape = (times, lats, lons)
    values = np.arange(times * lats * lons, dtype="float32").reshape(shape)
    coordinates = {
        "time": np.datetime64("2020-01-01", "ns") + np.arange(times) * np.timedelta64(1, "D"),
        "lat": np.linspace(70, 0, lats),
        "lon": np.arange(lons) * 10.0,
    }
    return xr.Dataset(
        {
            "t2m": (("time", "lat", "lon"), values),
            "mask": (("lat", "lon"), values[0] % 2 == 0),
        },
        coordinates,
    )


def walk(
    samples: Any, size: int, world: int, epoch: int = 0, start: int = 0, **options: Any
) -> list[list[int]]:
    """Walk all ranks in lockstep; return the numbers of each global batch that count.

    The ids that a ledger gets have to be those numbers. `samples` are numbered.
    """
    options = {"keep_ids": True, **options}
    loaders = [loader_of(samples, size, rank, world, **options) for rank in range(world)]
    batches = []
    for step in zip(*(loader.lockstep(epoch, start) for loader in loaders), strict=True):
        counted = []
        for data, share in step:
            index = data["index"] if isinstance(data, dict) else data[1]
            counted += index[: share.num_local].tolist()
        assert [n for _, share in step for n in share.samples] == counted
        batches.append(counted)
    return batches


def samples_of(samples: Any) -> dict[int, Any]:
    """Return each sample by its number, in the order in which they come unshuffled."""
    found = {}
    for batch in loader_of(samples, 7, shuffle=False):
        if isinstance(batch, dict):
            for i, number in enumerate(batch["index"].tolist()):
                found[number] = {name: each[i].numpy() for name, each in batch.items()}
        else:
            found.update(zip(batch[1].tolist(), batch[0].numpy(), strict=True))
    return found
