"""TensorBoard's event files: appending to one that a killed process may have left half written."""

import functools
import os
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

_HEAD = struct.Struct("<QI")
_FOOT = struct.Struct("<I")
_FILE_VERSION = "brain.Event:2"


class EventFile:
    """An event file to append to; its records are length, checksum, event, checksum."""

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
        """Append events, so that they outlive this machine; return the file's bytes."""
        with self.path.open("ab") as file:
            return _write(file, events)


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


def _event_class() -> Any:
    from tensorboard.compat.proto.event_pb2 import Event  # noqa: PLC0415 - optional

    return Event


def _write(file: BinaryIO, events: Sequence[Any]) -> int:
    data = [event.SerializeToString() for event in events]
    pairs = zip(data, _crcs(data), strict=True)
    file.writelines(_head(len(each)) + each + _FOOT.pack(crc) for each, crc in pairs)
    file.flush()
    os.fsync(file.fileno())
    return file.tell()


def _record(file: BinaryIO) -> bytes:
    """Read the next record's event; nothing if it isn't whole."""
    head = file.read(_HEAD.size)
    if len(head) < _HEAD.size:
        return b""
    length, crc = _HEAD.unpack(head)
    if crc != _crc_of_length(length):
        return b""
    data, foot = file.read(length), file.read(_FOOT.size)
    is_whole = len(data) == length and len(foot) == _FOOT.size
    return data if is_whole and _FOOT.unpack(foot)[0] == _crcs([data])[0] else b""


@functools.cache
def _head(length: int) -> bytes:
    return _HEAD.pack(length, _crc_of_length(length))


@functools.cache
def _crc_of_length(length: int) -> int:
    return int(_crcs([struct.pack("<Q", length)])[0])


def _crcs(data: Sequence[bytes]) -> list[int]:
    """Return the masked CRC-32C of each; TensorBoard's own function takes 20 µs, all at once 1."""
    found = np.empty(len(data), np.uint32)
    lengths = np.array([len(each) for each in data])
    for length in np.unique(lengths):
        numbers = np.flatnonzero(lengths == length)
        joined = b"".join(data[number] for number in numbers.tolist())
        crc = np.full(len(numbers), 0xFFFFFFFF, np.uint32)
        for column in np.frombuffer(joined, np.uint8).reshape(len(numbers), length).T:
            crc = _table()[(crc ^ column) & 0xFF] ^ (crc >> 8)
        crc = ~crc
        found[numbers] = ((crc >> 15) | (crc << 17)) + np.uint32(0xA282EAD8)
    return [int(each) for each in found]


@functools.cache
def _table() -> NDArray[np.uint32]:
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import CRC_TABLE  # noqa: PLC0415

    return np.array(CRC_TABLE, np.uint32)
