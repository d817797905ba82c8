"""What Dask computes and writes of a collection: a table's partitions, or blocks of arrays."""

from collections.abc import Mapping, Sequence
from itertools import accumulate, product
from typing import Any, Protocol

from dask.base import optimize
from dask.delayed import delayed

from prefect_torch_ddp.data.arrays.statistics import measured, merged, statistics_key
from prefect_torch_ddp.data.arrays.writing import (
    HOW,
    VariableTarget,
    file_of,
    refuse_changed,
    write_block,
)
from prefect_torch_ddp.data.datasets.dataset_manifest import DatasetFile, Written
from prefect_torch_ddp.data.tables.writing import write_partition
from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.storage.protocol import Storage

KEPT_ENCODING = frozenset(
    {"dtype", "scale_factor", "add_offset", "_FillValue", "missing_value", "units", "calendar"}
)
"""What is kept of how a variable was stored: what its values mean. The rest depends on the format
that it was read from."""


class CollectionWriter(Protocol):
    """A collection in partitions, each of which a worker computes and writes."""

    unit: str
    """What the partitions are called, for people."""
    writes: list[Any]
    """A Delayed of a `Written` for each partition."""

    def take(self, number: int, written: Written) -> None:
        """Take note of what was written of a partition.

        Raises:
            InvalidParamsError: it doesn't fit what was written of others.
        """
        del number, written

    def again(self, written: Sequence[Written]) -> "CollectionWriter | None":
        """Return the partitions to write in another form now that all are known, if there are any.

        They are then asked for the files.
        """
        del written
        return None

    def files(self, written: Sequence[Written]) -> list[DatasetFile]:
        """Write what is left when all partitions are written; return the files of the dataset."""
        ...


def files_of(written: Sequence[Written], if_none: str) -> list[DatasetFile]:
    """Return the files of all partitions; raises InvalidParamsError by `if_none` without one."""
    files = [file for each in written for file in each.files]
    if not files:
        raise InvalidParamsError(if_none)
    return files


class TableWriter(CollectionWriter):
    """The partitions of a Dask DataFrame.

    Args:
        frame: the DataFrame.
        storage: of the dataset.
        files_key: the folder of its files.
    """

    unit = "partitions"

    def __init__(self, frame: Any, storage: Storage, files_key: str) -> None:
        write = delayed(write_partition, pure=False)
        partitions = frame.to_delayed()
        dtypes = delayed({str(name): dtype for name, dtype in frame.dtypes.items()}, traverse=False)
        self.writes = [
            write(each, storage, files_key, i, dtypes) for i, each in enumerate(partitions)
        ]
        self._types: dict[str, tuple[int, str, str]] = {}
        """For each column that may have any type: the first partition with one, and which."""

    def take(self, number: int, written: Written) -> None:
        """Refuse a partition whose types don't fit those before it: together they are no table."""
        for name, (kind, type_) in (written.about or {}).items():
            first, its_kind, its_type = self._types.setdefault(name, (number, kind, type_))
            if kind != its_kind:
                msg = (
                    f"column {name} of the Dask DataFrame is {type_} in partition {number} and "
                    f"{its_type} in partition {first}: call astype({{{name!r}: ...}}) on the "
                    "DataFrame, with one type for all partitions"
                )
                raise InvalidParamsError(msg)

    def files(self, written: Sequence[Written]) -> list[DatasetFile]:
        """Return the files of the dataset; they are all written.

        Raises:
            InvalidParamsError: there are no rows.
        """
        return files_of(written, "the Dask DataFrame has no rows")


class ArrayWriter(CollectionWriter):
    """The blocks of all Dask arrays of an xarray Dataset.

    Its other variables are written here, since they are in memory.

    Args:
        collection: a Dataset, a DataArray, or a Dask array.
        storage: of the dataset.
        files_key: the folder of its files, which becomes a Zarr group.

    Raises:
        InvalidParamsError: xarray can't write such a Dataset as Zarr; says why.
    """

    unit = "blocks"

    def __init__(self, collection: Any, storage: Storage, files_key: str) -> None:
        dataset = _encoded(_as_dataset(collection))
        lazy = [each for each in dataset.variables.values() if each.chunks is not None]
        # Array by array: xarray loses the keys of a persisted Dataset when it is optimized whole.
        for variable, data in zip(lazy, optimize(*(each.data for each in lazy)), strict=True):
            variable.data = data
        self._storage, self._files_key = storage, files_key
        self._objects = _template(dataset)
        self._dataset = dataset
        self._names: list[str] = []
        self.writes: list[Any] = []
        for name, variable in dataset.variables.items():
            if variable.chunks is not None:
                self._add(str(name), variable, is_measured=name in dataset.data_vars)

    def _add(self, name: str, variable: Any, *, is_measured: bool) -> None:
        own = ("zarr.json", f"{name}/zarr.json")
        target = VariableTarget(
            self._storage,
            self._files_key,
            name,
            tuple(map(str, variable.dims)),
            variable.dtype,
            {key: self._objects[key] for key in own},
            is_measured,
            _stored_otherwise(variable),
        )
        # Once for all blocks, and not in each block's task.
        given, write = delayed(target), delayed(write_block, pure=False)
        blocks = variable.data.to_delayed(optimize_graph=False)
        starts = [list(accumulate(sizes, initial=0))[:-1] for sizes in variable.chunks]
        numbers = product(*(range(len(each)) for each in starts))
        for index, start, shape in zip(
            numbers, product(*starts), product(*variable.chunks), strict=True
        ):
            self.writes.append(write(blocks[index], given, start, shape))
            self._names.append(name)

    def files(self, written: Sequence[Written]) -> list[DatasetFile]:
        """Write metadata, statistics and the variables that are in memory; return all files."""
        found: dict[str, list[Any]] = {}
        for name, each in zip(self._names, written, strict=True):
            found.setdefault(name, []).append(each.about)
        for name, variable in self._dataset.data_vars.items():
            if variable.chunks is None:
                found[str(name)] = [measured(variable.values)]
        statistics = {
            statistics_key(name): merged(parts).to_bytes()
            for name, parts in found.items()
            if parts[0] is not None
        }
        files = [file for each in written for file in each.files]
        for key, content in {**self._objects, **statistics}.items():
            self._storage.write(f"{self._files_key}/{key}", content)
            files.append(file_of(key, content))
        return files


def kept_encodings(collection: Any) -> Mapping[str, Mapping[str, Any]]:
    """Return how the variables of an xarray object are to be stored; empty for other kinds."""
    if not type(collection).__module__.startswith("xarray."):
        return {}
    kept = KEPT_ENCODING | {"chunks"}
    return {
        str(name): {key: value for key, value in variable.encoding.items() if key in kept}
        for name, variable in _as_dataset(collection).variables.items()
    }


def _as_dataset(collection: Any) -> Any:
    import xarray as xr  # noqa: PLC0415 - an extra

    if not type(collection).__module__.startswith("xarray."):
        collection = xr.DataArray(collection, name="values")  # or it has Dask's name of the array
    if hasattr(collection, "to_dataset"):  # a DataArray
        collection = collection.to_dataset(
            name="values" if collection.name is None else collection.name
        )
    return collection


def _encoded(dataset: Any) -> Any:
    """Return the dataset with the encodings that are kept, and the chunks that fit."""
    plain = dataset.drop_encoding()
    for name, variable in dataset.variables.items():
        encoding = variable.encoding
        kept = {key: value for key, value in encoding.items() if key in KEPT_ENCODING}
        chunks = encoding.get("chunks")
        if chunks is not None and variable.chunks is not None and _fit(chunks, variable.chunks):
            kept["chunks"] = chunks
        plain.variables[name].encoding = kept
        if variable.chunks is not None and not variable.ndim:
            msg = f"{name} of the Dask collection is a single value: call its compute()"
            raise InvalidParamsError(msg)
        if "/" in str(name):
            msg = (
                f"{name} of the Dask collection has a slash in its name, which would make a group "
                "of Zarr: rename it"
            )
            raise InvalidParamsError(msg)
    return plain


def _stored_otherwise(variable: Any) -> Mapping[str, Any]:
    """Return what of a variable's encoding changes how its values are stored."""
    return {key: each for key, each in variable.encoding.items() if key in KEPT_ENCODING}


def _fit(chunks: Sequence[int], blocks: Sequence[Sequence[int]]) -> bool:
    """Tell whether each of Dask's blocks has whole chunks."""
    return len(chunks) == len(blocks) and all(
        not size % chunk for chunk, sizes in zip(chunks, blocks, strict=True) for size in sizes[:-1]
    )


def _template(dataset: Any) -> Mapping[str, bytes]:
    """Return the objects of the Zarr group, without the chunks of Dask's arrays."""
    from zarr.storage import MemoryStore  # noqa: PLC0415 - an extra

    objects: dict[str, Any] = {}
    try:
        dataset.to_zarr(MemoryStore(objects), mode="w-", compute=False, **HOW)
    except (TypeError, ValueError, NotImplementedError) as error:
        msg = f"the Dask collection can't be written as Zarr: {error}"
        raise InvalidParamsError(msg) from error
    for name, variable in dataset.variables.items():
        if variable.chunks is None:
            refuse_changed(objects, str(name), variable, _stored_otherwise(variable), {})
    return {key: content.to_bytes() for key, content in objects.items()}
