"""What `dask worker --preload` loads in batch jobs of tests: it notes when the worker is there."""

import os
import time
from pathlib import Path
from typing import Any


def dask_setup(worker: Any) -> None:
    """Write the time, in Unix seconds, into the folder `PTD_MARKS`."""
    folder, job = os.environ["PTD_MARKS"], os.environ["SLURM_JOB_ID"]
    Path(folder, f"worker-{job}").write_text(str(time.time()))
