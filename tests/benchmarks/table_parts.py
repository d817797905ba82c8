"""The rows that the benchmarks of tables have; Dask workers make them too, so it loads no torch."""

import numpy as np
import pandas as pd

NUM_COLUMNS, FILE_ROWS = 64, 131_072
FEATURES = [f"c{i:02d}" for i in range(NUM_COLUMNS - 1)]
META = dict.fromkeys([*FEATURES, "target"], "float32")


def rows_of(number: int) -> pd.DataFrame:
    """Return a part: float32 columns of noise."""
    generator = np.random.default_rng(number)
    values = generator.standard_normal((NUM_COLUMNS, FILE_ROWS), dtype=np.float32)
    return pd.DataFrame(dict(zip(META, values, strict=True)))
