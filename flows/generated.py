"""Data that workloads generate by themselves. Dask workers call these functions: no torch here.

A dataset's id doesn't depend on this module: if you change what it generates, change `prepare` too.
"""

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr

ZONES = tuple(f"zone {number:02}" for number in range(24))
PAYMENTS = ("cash", "card", "app")
TRIPS_A_DAY = 500
FAULTS = 0.01
"""Share of the trips with each kind of fault."""
STEP_H = 6


def weather(times: int, seed: int) -> "xr.Dataset":
    """Return a Dask-backed Dataset: the height of a pressure level on a grid, every 6 hours.

    Waves of several lengths travel around the globe, each at its speed, in several bands of
    latitude; measurements have noise. `height` is in metres, [time, lat 32, lon 64].

    Args:
        times: number of time steps.
        seed: determines the waves and the noise.
    """
    import dask.array as da  # noqa: PLC0415 - an extra
    import xarray as xr  # noqa: PLC0415

    shape, chunk = (times, 32, 64), 32
    values = da.map_blocks(
        _heights,
        da.arange(times, chunks=chunk),
        seed,
        new_axis=[1, 2],
        chunks=(da.core.normalize_chunks(chunk, (times,))[0], shape[1:2], shape[2:]),
        dtype="float32",
    )
    coordinates = {
        "time": np.array([time_at(number) for number in range(times)]),
        "lat": np.linspace(77.5, -77.5, shape[1]),
        "lon": np.arange(shape[2]) * 360 / shape[2],
    }
    height = xr.DataArray(values, coordinates, ("time", "lat", "lon"), attrs={"units": "m"})
    return xr.Dataset({"height": height})


def time_at(number: int) -> np.datetime64:
    """Return the time of a step."""
    return np.datetime64("2020-01-01", "ns") + np.timedelta64(STEP_H * number, "h")


def _heights(times: Any, seed: int) -> Any:
    generator = np.random.default_rng([seed, 0])
    lat, lon = np.linspace(-1, 1, 32)[:, None], np.arange(64) * 2 * np.pi / 64
    field = np.zeros((len(times), 32, 64))
    for _ in range(8):
        number, centre = generator.integers(1, 6), generator.uniform(-0.8, 0.8)
        speed, phase = generator.uniform(0.15, 0.45), generator.uniform(0, 2 * np.pi)
        angle = number * (lon - speed * np.asarray(times)[:, None]) + phase
        field += np.exp(-(((lat - centre) / 0.35) ** 2)) * np.sin(angle)[:, None, :]
    noise = np.random.default_rng([seed, 1, int(times[0])]).normal(0, 0.05, field.shape)
    mean = 5500 - 400 * lat**2
    return (mean + 120 * (field + noise)).astype("float32")


def trips(day: int, seed: int) -> "pd.DataFrame":
    """Return a day's taxi trips, with the faults of real records: 500 rows.

    Columns: `day`, `hour`, `weekday`, `zone`, `payment`, `passengers` (some are missing),
    `distance` in km (some are negative), `fare` (some are 0) and `tipped`, 0 or 1.

    Args:
        day: its number, from 0.
        seed: determines the trips.
    """
    import pandas as pd  # noqa: PLC0415 - an extra

    num = TRIPS_A_DAY
    # What holds on all days: the price of a zone, and whether people tip there.
    zones = np.random.default_rng([seed, 0])
    price, generosity = zones.normal(0, 4, len(ZONES)), zones.normal(0, 1.5, len(ZONES))
    generator = np.random.default_rng([seed, 1, day])
    zone, hour = generator.integers(0, len(ZONES), num), generator.integers(0, 24, num)
    payment = generator.choice(len(PAYMENTS), num, p=[0.3, 0.5, 0.2])
    distance = generator.gamma(2.0, 2.5, num)
    rush = np.isin(hour, (7, 8, 16, 17, 18))
    fare = 4 + 1.9 * distance * (1 + 0.3 * rush) + np.abs(price[zone])
    fare += generator.normal(0, 1, num)
    inclination = generosity[zone] + np.array([-2.5, 1.0, 2.0])[payment]
    tipped = generator.random(num) < 1 / (1 + np.exp(-inclination))
    passengers = generator.integers(1, 5, num).astype("float32")
    passengers[generator.random(num) < FAULTS] = np.nan
    distance[generator.random(num) < FAULTS] *= -1
    fare[generator.random(num) < FAULTS] = 0
    return pd.DataFrame(
        {
            "day": np.full(num, day, "int32"),
            "hour": hour.astype("int32"),
            "weekday": np.full(num, day % 7, "int32"),
            "zone": np.array(ZONES, dtype=object)[zone],
            "payment": np.array(PAYMENTS, dtype=object)[payment],
            "passengers": passengers,
            "distance": distance.astype("float32"),
            "fare": fare.astype("float32"),
            "tipped": tipped.astype("int64"),
        }
    )
