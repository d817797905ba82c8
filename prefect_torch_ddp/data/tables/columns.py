"""The columns of a table: which types can become tensors, and what all files must agree on."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from prefect_torch_ddp.data.tables.parquet_files import TableFile
from prefect_torch_ddp.errors import InvalidParamsError

Kind: TypeAlias = Literal["bool", "int", "float", "category"]
Value: TypeAlias = bool | float | str
Array: TypeAlias = np.ndarray[Any, Any]

_DTYPES: Mapping[str, str] = {
    # torch computes with no unsigned integers but uint8.
    "uint16": "int32",
    "uint32": "int64",
    "uint64": "int64",
    "halffloat": "float16",
    "float": "float32",
    "double": "float64",
}
_REFUSED: Sequence[tuple[Callable[[Any], bool], str]] = (
    (types.is_nested, "flatten it into plain columns in prepare"),
    (types.is_decimal, "cast it to float64, or to whole numbers such as cents, in prepare"),
    (types.is_temporal, "compute numbers of it in prepare, such as seconds or the hour of the day"),
)


@dataclass(frozen=True)
class Column:
    """A column, and how its values become numbers."""

    name: str
    kind: Kind
    dtype: str
    """The tensor's dtype, by NumPy's name; codes of categories are int64."""
    values: tuple[str, ...] = ()
    """The values of a category; a value's code is its position here."""
    fill: Value | None = None
    """The value that replaces a null; None: a null is an error."""

    def numbers(self, column: Any, where: str) -> Array:
        """Return a chunked column of a file as numbers [rows].

        Raises:
            InvalidParamsError: it has nulls and there is no `fill`, or values that aren't known.
        """
        if self.kind != "category" and types.is_dictionary(column.type):
            column = column.cast(column.type.value_type)
        if column.null_count and self.fill is None:
            raise InvalidParamsError(nulls_refused(self.name, column.null_count, where))
        if self.kind == "category":
            is_null = types.is_null(column.type)
            return self._as_codes(column.cast(pa.string()) if is_null else column, where)
        if types.is_uint64(column.type) and (pc.max(column).as_py() or 0) > np.iinfo(np.int64).max:
            most = pc.max(column).as_py()
            msg = (
                f"column {self.name} of {where} has {most}, which is too large for int64: cast it "
                "to float64 in prepare"
            )
            raise InvalidParamsError(msg)
        if column.null_count:
            # The file's own type may be null, or too narrow for the fill value.
            type_ = pa.from_numpy_dtype(self.dtype)
            # pyarrow takes no integer that a float has to round.
            fill = self.fill if self.kind != "float" or self.fill is None else float(self.fill)
            column = column.cast(type_).fill_null(pa.scalar(fill, type_))
        numbers: Array = column.to_numpy()
        return numbers

    def _as_codes(self, column: Any, where: str) -> Array:
        known = pa.array(self.values, pa.string())
        parts = []
        for chunk in column.chunks:
            encoded = chunk if types.is_dictionary(chunk.type) else chunk.dictionary_encode()
            texts = encoded.dictionary.cast(pa.string())
            # One more entry, for nulls.
            code_of = pc.index_in(texts, known).fill_null(-1).to_numpy(zero_copy_only=False)
            of_null = -1 if self.fill is None else self.values.index(str(self.fill))
            code_of = np.append(code_of.astype(np.int64), of_null)
            # int64, since the file's index type may be too narrow for one more entry.
            indices = encoded.indices.cast(pa.int64()).fill_null(len(texts)).to_numpy()
            codes = code_of[indices]
            if len(codes) and codes.min() < 0:
                value = texts[int(indices[int(codes.argmin())])].as_py()
                msg = (
                    f"column {self.name} of {where} has the value {value!r}, which isn't one of "
                    f"the {len(self.values)} in categories: add it there, or filter it out"
                )
                raise InvalidParamsError(msg)
            parts.append(codes)
        return np.concatenate(parts) if parts else np.empty(0, np.int64)


def nulls_refused(name: str, num: int, where: str) -> str:
    """Return the error text for nulls in a column, with the ways to fill or drop them."""
    return (
        f"column {name} of {where} has {num} nulls (pandas writes nan as null): pass "
        f"fill={{{name!r}: value}} to table(), filter them out, or fill them when the table is "
        "prepared"
    )


def texts_in(column: Any) -> set[str]:
    """Return the distinct texts of a chunked column; nulls are left out."""
    if types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    return set(pc.unique(column).drop_null().to_pylist())


def kind_in(file: TableFile, name: str) -> tuple[Kind, str] | None:
    """Return the kind of a file's column and its tensor's dtype; None if it holds only nulls.

    Raises:
        InvalidParamsError: the file has no such column, or the column can't become a tensor.
    """
    type_ = file.type_of(name)
    if types.is_dictionary(type_):
        type_ = type_.value_type
    if types.is_null(type_):
        return None
    if types.is_boolean(type_):
        return "bool", "bool"
    if types.is_integer(type_) or types.is_floating(type_):
        kind: Kind = "int" if types.is_integer(type_) else "float"
        return kind, _DTYPES.get(str(type_), str(type_))
    if types.is_string(type_) or types.is_large_string(type_) or str(type_) == "string_view":
        return "category", "int64"
    way_out = next((way for is_one, way in _REFUSED if is_one(type_)), "leave it out")
    msg = f"column {name} of {file.uri} is {type_}, which can't be a tensor: {way_out}"
    raise InvalidParamsError(msg)


def common_kind(files: Sequence[TableFile], name: str) -> tuple[Kind, str]:
    """Return the kind of a column in all files, and a dtype that can hold every file's values.

    The width of integers, or of floats, may differ between files.

    Raises:
        InvalidParamsError: the files disagree on the type, or the column can't become a tensor.
    """
    found: tuple[Kind, str] | None = None
    first = files[0]
    for file in files:
        here = kind_in(file, name)
        if here is None:
            continue
        if found is None:
            found, first = here, file
        elif here[0] != found[0]:
            msg = (
                f"column {name} is {file.type_of(name)} in {file.uri} and {first.type_of(name)} in "
                f"{first.uri}: write it with one type in all files"
            )
            raise InvalidParamsError(msg)
        elif here[1] != found[1]:
            found = found[0], str(np.result_type(found[1], here[1]))
    if found is None:
        msg = f"column {name} of {first.uri} holds only nulls: leave it out"
        raise InvalidParamsError(msg)
    return found


def checked_fill(
    name: str, kind: Kind, dtype: str, values: Sequence[str], fill: Value | None
) -> Value | None:
    """Return the value that replaces a column's nulls; refuse one that the column can't hold."""
    if isinstance(fill, np.generic):  # such as a column's own least value
        fill = fill.item()  # type: ignore[unreachable]  # no int64 is an int
    fits = {
        "bool": isinstance(fill, bool),
        "int": isinstance(fill, int) and not isinstance(fill, bool),
        "float": isinstance(fill, int | float) and not isinstance(fill, bool),
        "category": fill in values,
    }
    if fill is not None and not fits[kind]:
        fitting = {"bool": "True or False", "int": "a whole number", "float": "a number"}
        give = fitting.get(kind, f"one of its categories, {', '.join(values[:20])}")
        msg = f"fill has {fill!r} for column {name}, which is {kind}: give {give}"
        raise InvalidParamsError(msg)
    if fill is not None and not _is_held(fill, dtype):
        msg = f"fill has {fill!r} for column {name}, which {dtype} can't hold: give another value"
        raise InvalidParamsError(msg)
    return fill


def _is_held(fill: Value, dtype: str) -> bool:
    """Return whether a tensor of this dtype can hold a number; True for texts and booleans."""
    if isinstance(fill, bool | str):
        return True
    if dtype.startswith("float"):
        # NaN and infinities too; not math.isfinite, for which a whole number may be too large.
        most = float(np.finfo(dtype).max)
        return not most < abs(fill) < math.inf
    return bool(np.iinfo(dtype).min <= fill <= np.iinfo(dtype).max)
