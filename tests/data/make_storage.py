"""Makes a small storage as this version writes it: `python -m tests.data.make_storage FOLDER`.

It is run once for a release, in a folder whose path says nothing of the machine; the result is
committed as `tests/data/storage-<version>` and kept for ever.
"""

import socket
import sys
from pathlib import Path

from prefect_torch_ddp import CheckpointParams, TrainParams, train_flow


def main() -> None:
    """Train two epochs, and leave the storage without the machine's name."""
    folder = Path(sys.argv[1])
    params = TrainParams(
        workload="tests.data.points",
        storage=str(folder),
        world_size=2,
        options={"epochs": 2},
        ledger=True,
        checkpoint=CheckpointParams(every_steps=2, every_s=None, keep_last=2),
    )
    report = train_flow(params)
    name = socket.gethostname().encode()
    for path in folder.rglob("*"):
        if path.is_file() and path.suffix not in {".pt", ".safetensors"}:
            path.write_bytes(path.read_bytes().replace(name, b"host"))
    print(report.run_id)


if __name__ == "__main__":
    main()
