"""What a partition of a Bag has, and what all partitions together have to agree on."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from prefect_torch_ddp.data.arrays.statistics import Statistics
from prefect_torch_ddp.errors import InvalidParamsError


@dataclass(frozen=True)
class DictRows:
    """Dicts: the columns of a table."""

    partition: int
    """The first one that has them."""
    columns: Mapping[str, tuple[Any, int]]
    """The Arrow type of each column, and a partition that has it."""

    what = "dicts"

    def joined(self, other: "DictRows") -> "DictRows":
        """Return the columns of both, as pyarrow promotes types that differ.

        Raises:
            InvalidParamsError: types don't go together; names the key and the partitions.
        """
        columns = dict(self.columns)
        for key, (type_, partition) in other.columns.items():
            columns[key] = _promoted(key, columns.get(key, (type_, partition)), (type_, partition))
        return replace(self, columns=columns)

    def fits(self, common: "DictRows") -> bool:
        """Tell whether a table can be read as it is if all partitions together have `common`."""
        import pyarrow as pa  # noqa: PLC0415 - an extra

        return self.columns.keys() == common.columns.keys() and all(
            type_ in {pa.null(), common.columns[key][0]} for key, (type_, _) in self.columns.items()
        )


@dataclass(frozen=True)
class Stack:
    """NumPy arrays of one shape and dtype: samples along the first axis."""

    partition: int
    """The first one that has them."""
    dtype: str
    shape: tuple[int, ...]
    """Of a sample."""
    statistics: Statistics | None
    """Of this partition."""

    what = "arrays"

    def joined(self, other: "Stack") -> "Stack":
        """Return what the arrays of both have in common.

        Raises:
            InvalidParamsError: they differ; names the partitions.
        """
        if (self.dtype, self.shape) != (other.dtype, other.shape):
            msg = (
                f"partition {other.partition} of the Dask Bag has arrays of {other.dtype} and the "
                f"shape {other.shape}, but partition {self.partition} of {self.dtype} and the "
                f"shape {self.shape}: make them equal"
            )
            raise InvalidParamsError(msg)
        return self


BagForm: TypeAlias = DictRows | Stack


def joined(one: BagForm, other: BagForm) -> BagForm:
    """Return what the items of both have in common.

    Raises:
        InvalidParamsError: nothing; names the partitions.
    """
    match one, other:
        case (DictRows(), DictRows()) | (Stack(), Stack()):
            return one.joined(other)  # type: ignore[arg-type]
    msg = (
        f"partition {other.partition} of the Dask Bag has {other.what}, but partition "
        f"{one.partition} {one.what}: return two Bags, or make all items of one kind"
    )
    raise InvalidParamsError(msg)


def _promoted(key: str, one: tuple[Any, int], other: tuple[Any, int]) -> tuple[Any, int]:
    """Return the Arrow type that holds both, and the partition that has it."""
    import pyarrow as pa  # noqa: PLC0415 - an extra

    schemas = [pa.schema([(key, type_)]) for type_, _ in (one, other)]
    try:
        type_ = pa.unify_schemas(schemas, promote_options="permissive").field(key).type
    except pa.ArrowException as error:
        msg = (
            f"{key} of the Dask Bag is {other[0]} in partition {other[1]} and {one[0]} in "
            f"partition {one[1]}: give it one type, such as by map()"
        )
        raise InvalidParamsError(msg) from error
    return type_, one[1] if type_ == one[0] else other[1]
