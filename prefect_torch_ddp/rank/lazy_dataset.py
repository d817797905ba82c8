"""Which Dask collections become datasets, and which are refused; loads neither Dask nor torch."""

import copyreg
import math
import sys
from functools import partial
from typing import Any

import cloudpickle

from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.protocol.prepared import LazyDataset

MAX_IN_MEMORY_BYTES = 64 * 2**20
"""Of a variable that Dask doesn't compute, such as a mask or coordinates."""


def is_collection(value: object) -> bool:
    """Tell whether a value is of a class that Dask computes."""
    # By Dask's own protocol: a rank doesn't load Dask to look.
    return hasattr(type(value), "__dask_graph__")


def kind_of(value: object) -> str:
    """Return a value's class, with its module."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def let_frames_be_sent() -> None:
    """Have what pyarrow knows of a file be pickled, which pyarrow itself can't.

    A frame that was read with `filesystem="arrow"` has it for each of its files.
    """
    if (fs := sys.modules.get("pyarrow.fs")) is not None:
        copyreg.pickle(fs.FileInfo, _by_fields)


def _by_fields(info: Any) -> tuple[Any, ...]:
    made: Any = type(info)
    return partial(made, info.path, info.type, mtime_ns=info.mtime_ns, size=info.size), ()


def refuse_for_script(value: object, script: str) -> None:
    """Refuse a collection as an argument of a script.

    Raises:
        InvalidParamsError: it is one; names the script.
    """
    if is_collection(value):
        msg = (
            f"{script} is given a {kind_of(value)}, which a script would get as a text: give it to "
            "a ddp_task, or write it to a folder before, and give the script the folder's path"
        )
        raise InvalidParamsError(msg)


def lazy_dataset(value: Any, what: str, otherwise: str = "") -> LazyDataset:
    """Return a Dask collection pickled.

    Args:
        value: the collection.
        what: where it is from, for errors: a subject and a verb, such as "prepare returned".
        otherwise: what else to do with a collection that can't be a dataset, for errors.

    Raises:
        InvalidParamsError: it can't be a dataset, or too much of it is in memory.
    """
    let_frames_be_sent()
    module, name, kind = type(value).__module__, type(value).__qualname__, kind_of(value)
    if module.startswith("dask.") and name == "DataFrame":
        return LazyDataset(kind, "table", cloudpickle.dumps(value))
    if module.startswith("dask.") and name == "Bag":
        return LazyDataset(kind, "bag", cloudpickle.dumps(value))
    if module.startswith("xarray.") and name in {"Dataset", "DataArray"}:
        _refuse_in_memory(value, name, what)
    elif not (module.startswith("dask.") and name == "Array"):
        msg = (
            f"{what} a {kind}; of Dask's collections a DataFrame, an Array, a Bag of dicts or "
            f"arrays, and xarray's Dataset are written: make one of them{otherwise}"
        )
        raise InvalidParamsError(msg)
    _refuse_unknown_sizes(value, what)
    return LazyDataset(kind, "arrays", cloudpickle.dumps(value))


def _refuse_unknown_sizes(value: Any, what: str) -> None:
    """Refuse an array of Dask's whose chunks have unknown sizes, as one made of a DataFrame has."""
    arrays = value.variables.values() if hasattr(value, "variables") else [value]
    if any(math.isnan(size) for each in arrays for sizes in each.chunks or () for size in sizes):
        msg = (
            f"{what} an array whose chunks have unknown sizes: call its compute_chunk_sizes(), or "
            "make it by to_dask_array(lengths=True)"
        )
        raise InvalidParamsError(msg)


def _refuse_in_memory(value: Any, kind: str, what: str) -> None:
    """Refuse a large variable of xarray that isn't Dask's: it would be sent in one piece."""
    named = value.variables if kind == "Dataset" else {value.name or "values": value.variable}
    for name, variable in named.items():
        if variable.chunks is None and variable.nbytes > MAX_IN_MEMORY_BYTES:
            msg = (
                f"{what} a {kind} whose {name} isn't an array of Dask's, and takes "
                f"{variable.nbytes / 1e6:.0f} MB: open it with chunks={{}}, or use .chunk(...)"
            )
            raise InvalidParamsError(msg)
