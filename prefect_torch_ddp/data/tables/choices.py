"""Which columns of a table are read, with which types, and whether a batch is a dict or (x, y)."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from prefect_torch_ddp.data.datasets.dataset_manifest import in_parallel
from prefect_torch_ddp.data.tables.columns import (
    Column,
    Value,
    checked_fill,
    common_kind,
    texts_in,
)
from prefect_torch_ddp.data.tables.form import Form
from prefect_torch_ddp.data.tables.parquet_files import TableFile
from prefect_torch_ddp.errors import InvalidParamsError

INDEX = re.compile(r"__index_level_\d+__|__null_dask_index__")
"""The names under which pandas and Dask write an index without a name."""


@dataclass(frozen=True)
class Chosen:
    """The columns that are read, by their names."""

    columns: tuple[str, ...]
    features: tuple[str, ...]
    targets: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all columns that are read."""
        return self.columns or (*self.features, *self.targets)

    def form(self, columns: Mapping[str, Column]) -> Form:
        """Return the form of the batches.

        Raises:
            InvalidParamsError: a feature isn't numeric, or the targets are of different kinds.
        """
        if self.columns:
            return Form.by_column({name: columns[name].dtype for name in self.columns})
        for name in self.features:
            if columns[name].kind == "category":
                msg = (
                    f"feature {name} is a category, and its codes aren't quantities: use columns= "
                    "to get the codes for an embedding, or leave it out of features"
                )
                raise InvalidParamsError(msg)
        kinds = {columns[name].kind == "float" for name in self.targets}
        if len(kinds) > 1:
            mixed = f"targets {', '.join(self.targets)} mix floats with other types"
            msg = f"{mixed}, but become one tensor: write them with one type in prepare"
            raise InvalidParamsError(msg)
        return Form.of_features(
            self.features, self.targets, "float32" if True in kinds else "int64"
        )


def chosen_names(
    first: TableFile,
    columns: Sequence[str] | None,
    features: Sequence[str] | None,
    target: str | Sequence[str] | None,
) -> Chosen:
    """Return the columns that are read. If none are named, these are the columns of `first`.

    Raises:
        InvalidParamsError: the arguments contradict each other, or `first` has no columns.
    """
    targets = _names([target] if isinstance(target, str) else target)
    columns, features = _listed("columns", columns), _listed("features", features)
    if columns is not None and (features is not None or targets):
        msg = "columns= makes a batch a dict, features= and target= make it (x, y): pass only one"
        raise InvalidParamsError(msg)
    if targets and features is None:
        msg = "target= needs features=: the columns that become x"
        raise InvalidParamsError(msg)
    if features is None and columns is None:
        columns = [name for name in first.schema.names if not INDEX.fullmatch(name)]
        if not columns:
            msg = f"{first.uri} has no column to read: leave the file out, or write it anew"
            raise InvalidParamsError(msg)
    chosen = Chosen(tuple(columns or ()), tuple(features or ()), targets)
    if len(set(chosen.names)) < len(chosen.names):
        msg = f"a column is named twice: {', '.join(chosen.names)}"
        raise InvalidParamsError(msg)
    return chosen


def _listed(what: str, given: Sequence[str] | None) -> Sequence[str] | None:
    if given is None:
        return None
    names = () if isinstance(given, str) else _names(given)
    if not names:
        msg = f"{what} is {given!r}; give a list of names"
        raise InvalidParamsError(msg)
    return names


def _names(given: Sequence[str] | None) -> tuple[str, ...]:
    return () if given is None else tuple(map(str, given))  # also those of an array


def resolved_columns(
    files: Sequence[TableFile],
    names: Sequence[str],
    categories: Mapping[str, Sequence[str]] | Sequence[str],
    fill: Mapping[str, Value],
) -> dict[str, Column]:
    """Return how each column that is read becomes a tensor, by its name.

    Raises:
        InvalidParamsError: the files disagree on a column's type, a column can't become a tensor,
            or `categories` or `fill` names a column that isn't read.
    """
    for what, given in (("categories", categories), ("fill", fill)):
        if unknown := [name for name in given if name not in names]:
            msg = f"{what} names {', '.join(unknown)}, but only {list(names)} are read"
            raise InvalidParamsError(msg)
    return {name: _resolved(files, name, categories, fill.get(name)) for name in names}


def _resolved(
    files: Sequence[TableFile],
    name: str,
    categories: Mapping[str, Sequence[str]] | Sequence[str],
    fill: Value | None,
) -> Column:
    kind, dtype = common_kind(files, name)
    values: tuple[str, ...] = ()
    if kind == "category":
        if name not in categories:
            msg = (
                f"column {name} of {files[0].uri} holds texts: list the values that it may have "
                f"in categories={{{name!r}: [...]}}, pass categories=[{name!r}] to use all values "
                "in the table, or leave it out of columns"
            )
            raise InvalidParamsError(msg)
        given = categories[name] if isinstance(categories, Mapping) else _texts_of(files, name)
        values = tuple(given)
        if isinstance(fill, str) and not isinstance(categories, Mapping) and fill not in values:
            values = (*values, fill)
        if not values or len(set(values)) < len(values) or not all(map(_is_text, values)):
            msg = f"categories of {name} are {values!r}; give at least one text, each only once"
            raise InvalidParamsError(msg)
    elif name in categories:
        msg = f"column {name} of {files[0].uri} is {kind}, not text: leave it out of categories"
        raise InvalidParamsError(msg)
    return Column(name, kind, dtype, values, checked_fill(name, kind, dtype, values, fill))


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _texts_of(files: Sequence[TableFile], name: str) -> list[str]:
    """Return the texts in a column of all files, sorted. Rows that filters drop are included."""

    def texts(file: TableFile) -> set[str]:
        groups = [group for group, size in enumerate(file.sizes) if size]
        found = file.tables(groups, [name], [name]) if groups else ()
        return set().union(*(texts_in(rows[name]) for rows in found))

    return sorted(set().union(*in_parallel(texts, files, num_threads=4)))
