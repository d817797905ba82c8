"""TensorBoard's event files: appending to one that a killed process may have left half written."""

import functools
import os
import struct
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

_LENGTH = struct.Struct("<Q")
_CRC = struct.Struct("<I")
_FILE_VERSION = "brain.Event:2"
_MASK_DELTA = 0xA282EAD8
"""Of a masked checksum, as TFRecord files have it."""
MIN_TOGETHER = 8
"""So many texts of one length are worth a call of numpy for each byte."""


class EventFile:
    """An event file to append to; its records are length, checksum, event, checksum.

    TensorBoard's own writer computes each checksum in Python, which takes as long as all else that
    is done for a metric's value. Here those of many events are computed together.
    """

    def __init__(self, path: Path) -> None:
        """Name it; nothing is opened yet.

        `open_tracker` checks first that TensorBoard is installed.
        """
        self.path = path

    def make(self, began_s: float) -> int:
        """Write its first event, at some Unix time; return the file's bytes."""
        with self.path.open("wb") as file:
            return _write(file, [_event_class()(wall_time=began_s, file_version=_FILE_VERSION)])

    def scalars_after(self, start: int) -> Iterator[tuple[str, int]]:
        """Yield tag and step of each value from a byte on; cut off what is half written."""
        end = start
        with self.path.open("r+b") as file:
            file.seek(start)
            while data := _record(file):
                event = _event_class().FromString(data)
                yield from ((value.tag, event.step) for value in event.summary.value)
                end = file.tell()
            file.truncate(end)

    def append(self, events: Sequence[Any]) -> int:
        """Append events; return the file's bytes."""
        with self.path.open("ab") as file:
            return _write(file, events)

    def sync(self) -> None:
        """Have what was appended outlive this machine."""
        with self.path.open("rb") as file:
            os.fsync(file.fileno())


def scalar(tag: str, value: float, step: int, time_s: float) -> Any:
    """Return the event of a metric's value at a step."""
    event = _event_class()(wall_time=time_s, step=step)
    event.summary.value.add(tag=tag, simple_value=value)
    return event


def text(tag: str, markdown: str, time_s: float) -> Any:
    """Return the event of a text, for TensorBoard's page of texts."""
    from tensorboard.compat.proto import types_pb2  # noqa: PLC0415 - optional
    from tensorboard.plugins.text.metadata import create_summary_metadata  # noqa: PLC0415

    event = _event_class()(wall_time=time_s)
    value = event.summary.value.add(tag=tag, metadata=create_summary_metadata("", ""))
    value.tensor.dtype = types_pb2.DT_STRING
    value.tensor.string_val.append(markdown.encode())
    value.tensor.tensor_shape.SetInParent()
    return event


@functools.cache
def _event_class() -> Any:
    from tensorboard.compat.proto.event_pb2 import Event  # noqa: PLC0415 - optional

    return Event


def _write(file: BinaryIO, events: Sequence[Any]) -> int:
    texts = [event.SerializeToString() for event in events]
    lengths = [_LENGTH.pack(len(each)) for each in texts]
    records = zip(lengths, checksums(lengths), texts, checksums(texts), strict=True)
    file.write(b"".join(part for record in records for part in record))
    return file.tell()


def checksums(texts: Sequence[bytes]) -> list[bytes]:
    """Return the checksum of each text, in the order of the texts: a masked CRC-32C."""
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import (  # noqa: PLC0415 - optional
        CRC_TABLE,
        masked_crc32c,
    )

    by_length = defaultdict(list)
    for number, each in enumerate(texts):
        by_length[len(each)].append(number)
    table, found = np.array(CRC_TABLE, np.uint32), [b""] * len(texts)
    for length, numbers in by_length.items():
        if len(numbers) < MIN_TOGETHER:
            masked = [masked_crc32c(texts[number]) for number in numbers]
        else:
            joined = np.frombuffer(b"".join(texts[number] for number in numbers), np.uint8)
            crc = np.full(len(numbers), 0xFFFFFFFF, np.uint32)
            for column in joined.reshape(len(numbers), length).T:
                crc = table[(crc ^ column) & 0xFF] ^ (crc >> 8)
            crc = ~crc
            masked = ((crc >> 15 | crc << 17) + np.uint32(_MASK_DELTA)).tolist()
        for number, value in zip(numbers, masked, strict=True):
            found[number] = _CRC.pack(value)
    return found


def _record(file: BinaryIO) -> bytes:
    """Read the next record's event; nothing if it isn't whole.

    TensorBoard's own reader begins at a file's first byte, and doesn't say where a record ends.
    """
    if not (length := _checked(file, _LENGTH.size)):
        return b""
    return _checked(file, *_LENGTH.unpack(length))


def _checked(file: BinaryIO, num_bytes: int) -> bytes:
    """Read some bytes and their checksum; nothing if they aren't whole."""
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import (  # noqa: PLC0415 - optional
        masked_crc32c,
    )

    data, crc = file.read(num_bytes), file.read(_CRC.size)
    is_whole = len(data) == num_bytes and crc == _CRC.pack(masked_crc32c(data))
    return data if is_whole else b""
