"""What wandb wrote into an offline run's file, read without its server.

A file has the framing of LevelDB's log: blocks of 32 KiB, in each of which a record's piece has a
checksum, its length and its kind; a record is a protobuf message of wandb's.
https://github.com/google/leveldb/blob/main/doc/log_format.md
"""

import json
import struct
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK, HEAD, FILE_HEAD = 32 * 1024, struct.Struct("<IHB"), 7
FULL, FIRST, MIDDLE, LAST = range(1, 5)


def records_in(folder: Path) -> Iterator[Any]:
    """Yield the records of a run's folder."""
    from wandb.proto.wandb_internal_pb2 import Record

    (file,) = folder.glob("*.wandb")
    data, at, whole = file.read_bytes(), FILE_HEAD, b""
    assert data[:4] == b":W&B"
    while at + HEAD.size <= len(data):
        if BLOCK - at % BLOCK < HEAD.size:  # too little for another piece
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = HEAD.unpack_from(data, at)
        at += HEAD.size
        whole += data[at : at + length]
        at += length
        if kind in {FULL, LAST}:
            yield Record.FromString(whole)
            whole = b""


def run_in(folder: Path) -> dict[str, Any]:
    """Return a run's id, project, tags, configuration, summary and exit code, and its series."""
    found: dict[str, Any] = {"config": {}, "summary": {}, "series": defaultdict(list)}
    for record in records_in(folder):
        match record.WhichOneof("record_type"):
            case "run":
                found |= {"id": record.run.run_id, "project": record.run.project}
                found["tags"] = list(record.run.tags)
                found["config"] |= _values(record.run.config.update)
            case "config":
                found["config"] |= _values(record.config.update)
            case "summary":
                found["summary"] |= _values(record.summary.update)
            case "history":
                row = _values(record.history.item)
                step = row.pop("_step")
                found.setdefault("times", []).append(row.pop("_timestamp"))
                row.pop("_runtime", None)
                for name, value in row.items():
                    found["series"][name].append((step, float(value)))
            case "exit":
                found["exit"] = record.exit.exit_code
    return found


def _values(items: Any) -> dict[str, Any]:
    return {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items}
