"""Dask collections among a ddp_task's arguments: named by their content, and given as datasets."""

import ast
import hashlib
import inspect
import json
import os
import stat
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePath
from types import FunctionType, SimpleNamespace
from typing import TYPE_CHECKING, Any, Self

import cloudpickle
import distributed
from dask.base import is_dask_collection, tokenize
from prefect.utilities.collections import visit_collection

from prefect_torch_ddp.data.datasets.dataset_manifest import dataset_manifest_key
from prefect_torch_ddp.data.datasets.dataset_store import find_dataset, published_dataset
from prefect_torch_ddp.errors import InvalidParamsError, StorageError
from prefect_torch_ddp.lazy import parse_python
from prefect_torch_ddp.protocol.call import Call
from prefect_torch_ddp.protocol.prepared import LazyDataset
from prefect_torch_ddp.protocol.rank import is_installed
from prefect_torch_ddp.rank.lazy_dataset import lazy_dataset, refuse_for_script
from prefect_torch_ddp.storage.protocol import Storage
from prefect_torch_ddp.tasks.clusters.current import all_workers_here
from prefect_torch_ddp.tasks.gangs.collection_writers import kept_encodings
from prefect_torch_ddp.tasks.gangs.computed import publish_computed
from prefect_torch_ddp.tasks.report.markdown import count, size

if TYPE_CHECKING:
    from logging import Logger, LoggerAdapter

    LoggingAdapter = Logger | LoggerAdapter[Any]


_ZARR_METADATA = ("zarr.json", ".zgroup", ".zarray")
"""A folder is a Zarr store if it has one of these. The files of others may have nothing to do with
the collection: it might be a column's name, or the folder of the runs."""


@dataclass(frozen=True)
class DatasetName:
    """Names the dataset of a Dask collection, in the collection's place among the arguments."""

    dataset_id: str
    kind: str
    """The collection's class, with its module."""

    def __str__(self) -> str:
        """Return the id, for a `run_key` that names the argument."""
        return self.dataset_id


@dataclass(frozen=True)
class GivenCollections:
    """The Dask collections among a call's arguments, also in lists, dicts and dataclasses."""

    call: Call
    """The call, with the names of datasets in the places of the collections."""
    found: Mapping[DatasetName, tuple[str, LazyDataset]]
    """Each collection, with the argument that has it."""
    only_named: Mapping[DatasetName, Sequence[str]]
    """The stores that each collection reads of which only the address counts, for people."""

    @classmethod
    def in_call(cls, call: Call, signature: inspect.Signature) -> Self:
        """Find them. `signature` is the one that the call's arguments fit.

        Raises:
            InvalidParamsError: a collection can't be a dataset, which names the argument; or the
                call is of a script.
        """
        found: dict[DatasetName, tuple[str, LazyDataset]] = {}
        only_named: dict[DatasetName, Sequence[str]] = {}

        def named(argument: str, value: Any) -> Any:
            if not is_dask_collection(value):
                return value
            if isinstance(call.code, str):
                refuse_for_script(value, call.code)
            lazy = lazy_dataset(value, f"the argument {argument} of {call.name} is")
            dataset_id, stores = _dataset_id(value, lazy)
            name = DatasetName(dataset_id, lazy.kind)
            only_named[name] = stores
            found.setdefault(name, (argument, lazy))
            return name

        bound = signature.bind(*call.args, **call.kwargs)
        for argument, value in bound.arguments.items():
            bound.arguments[argument] = _replaced(value, partial(named, argument))
        named_call = Call(call.fn, bound.args, bound.kwargs) if found else call
        return cls(named_call, found, only_named)

    def check_writable(self, storage: Storage) -> None:
        """Check that the storage of the task, and of these datasets, can be written to.

        Raises:
            StorageError: it can't; names the arguments.
        """
        try:
            storage.check_writable()
        except StorageError as error:
            if not self.found:
                raise
            names = ", ".join(dict.fromkeys(argument for argument, _ in self.found.values()))
            msg = (
                f"{error}. The Dask workers write the collections that the call has ({names}) "
                "into the task's storage: give a folder or a bucket that they can write to as "
                "ddp_task(storage=...)"
            )
            raise StorageError(msg) from error

    def computed(
        self,
        client: distributed.Client,
        storage: Storage,
        logger: "LoggingAdapter",
        *,
        show: Callable[[str, float], None] = lambda _line, _percent: None,
    ) -> Call:
        """Have each dataset computed that isn't there; return the call with all as storages.

        Args:
            client: of the cluster whose workers compute.
            storage: of the task.
            logger: reports the progress.
            show: takes the same line, and how many percent are done, about twice a second.

        Raises:
            InvalidParamsError: a worker can't write a collection; names the argument.
            StorageError: the storage failed.
            GangCancelledError: this task was cancelled.
            Exception: what computing a part raised, with a note that names the argument.
        """
        for name, (argument, lazy) in self.found.items():
            if (there := find_dataset(storage, name.dataset_id)) is not None:
                words = "argument %s: dataset %s is already at %s: nothing to compute"
                logger.info(words, argument, there.dataset_id, there.uri)
                if stores := ", ".join(self.only_named[name]):
                    logger.warning(
                        "argument %s: only the address of %s counts for dataset %s: if its "
                        "content has changed, delete %s to have it computed again",
                        argument,
                        stores,
                        there.dataset_id,
                        f"{storage.uri}/{dataset_manifest_key(there.dataset_id)}",
                    )
                continue
            try:
                all_workers_here(client, storage)  # refuses those that don't see its folder
                made = publish_computed(client, storage, name.dataset_id, lazy, logger, show=show)
            except InvalidParamsError as error:
                msg = f"argument {argument}: {error}"
                raise InvalidParamsError(msg) from error
            except Exception as error:
                kind = f"a {name.kind}, was computed"
                error.add_note(f"raised while the argument {argument}, {kind}")
                raise
            words = "argument %s: computed as dataset %s (%s files, %s) at %s"
            extent = count(made.num_files), size(made.num_bytes)
            logger.info(words, argument, made.dataset_id, *extent, made.uri)

        def opened(value: Any) -> Any:
            named = isinstance(value, DatasetName)
            return published_dataset(storage, value.dataset_id) if named else value

        args, kwargs = _replaced((self.call.args, dict(self.call.kwargs)), opened)
        return Call(self.call.fn, args, kwargs)


def _replaced(value: Any, visit: Callable[[Any], Any]) -> Any:
    """Return a structure with what `visit` returns for its parts, as Prefect replaces futures."""
    return visit_collection(value, visit_fn=visit, return_data=True)


def _dataset_id(collection: Any, lazy: LazyDataset) -> tuple[str, Sequence[str]]:
    """Name a collection's dataset: the same computation, the same name, also in other processes.

    Also returns the stores that it reads whose content doesn't count, for people.
    """
    used = _NamesUsed(SimpleNamespace(write=lambda _: None), protocol=5)
    used.modules, used.texts, used.stores = set(), set(), {}
    used.dump(collection)
    files = _files_of(used.texts)
    parts = {
        # Dask's own name for the values. Only some of its readers have it depend on the files.
        "token": tokenize(collection, kept_encodings(collection)),
        "form": lazy.form,
        "code": _code_of(used.modules),
        "files": files,
    }
    name = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]
    return name, sorted(words for path, words in used.stores.items() if path not in files)


def _code_of(modules: set[str]) -> Mapping[str, str]:
    """Return a digest of each of the user's modules whose functions or classes Dask calls.

    Dask's tokens only have their names. Comments and layout don't count.
    """
    found: dict[str, str] = {}
    for name in modules - {"__main__"}:  # whose functions are in the tokens themselves
        module = sys.modules.get(name)
        file = getattr(module, "__file__", None)
        if module is None or file is None or is_installed(file):
            continue
        with suppress(OSError):  # compiled, or its file is gone
            code = ast.dump(parse_python(inspect.getsource(module).encode()))
            found[name] = hashlib.sha256(code.encode()).hexdigest()
    return found


def _files_of(texts: set[str]) -> Mapping[str, tuple[int, int] | str]:
    """Return size and time of each file of this machine that a text names, also in a Zarr store."""
    found: dict[str, tuple[int, int] | str] = {}
    for text in texts:
        with suppress(OSError, ValueError):  # it can be no file's name
            path = Path(text.removeprefix("file://"))
            about = path.stat()
            if stat.S_ISREG(about.st_mode):
                found[text] = (about.st_size, about.st_mtime_ns)
            elif any((path / name).is_file() for name in _ZARR_METADATA):
                found[text] = _listing_of(path)
    return found


def _listing_of(store: Path) -> str:
    """Return a digest of the names, sizes and times of all files in a folder, also linked ones."""
    found = []
    above: dict[str, set[tuple[int, int]]] = {str(store): set()}
    for folder, below, names in os.walk(store, followlinks=True):
        here, folders = _about(folder), above.pop(folder)
        if (here.st_dev, here.st_ino) in folders:  # a link to a folder above
            below.clear()
            continue
        within = os.path.relpath(folder, store)
        for name in names:
            about = _about(os.path.join(folder, name))  # noqa: PTH118 - many: no Paths
            found.append((within, name, about.st_size, about.st_mtime_ns))
        folders = {*folders, (here.st_dev, here.st_ino)}
        above.update((os.path.join(folder, name), folders) for name in below)  # noqa: PTH118
    return hashlib.sha256(repr(sorted(found)).encode(errors="surrogatepass")).hexdigest()


def _about(path: str) -> os.stat_result:
    """Return size and time of what a path leads to; of a link to nothing, its own."""
    try:
        return os.stat(path)  # noqa: PTH116 - many: no Paths
    except OSError:
        return os.lstat(path)


class _NamesUsed(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle is untyped
    """Notes what a collection has in it: modules of functions and classes, texts, Zarr stores."""

    modules: set[str]
    texts: set[str]
    stores: dict[str, str]
    """The paths of stores that may not be folders of this machine, each with words for people."""

    def persistent_id(self, value: Any) -> None:
        if isinstance(value, FunctionType | type) and value.__module__:
            self.modules.add(value.__module__)
        elif isinstance(value, str | PurePath):
            self.texts.add(str(value))
        elif type(value).__name__ == "FsspecStore":
            self.stores[value.path] = str(value).strip("<>")
