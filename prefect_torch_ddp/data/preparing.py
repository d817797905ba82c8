"""Helpers for a workload's `prepare`, and what is the dataset of a workload without one."""

import hashlib
import re
from collections.abc import Hashable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from prefect_torch_ddp.data.images.listing import list_dataset
from prefect_torch_ddp.errors import InvalidParamsError, StorageError
from prefect_torch_ddp.lazy import exported_by
from prefect_torch_ddp.results import DatasetReport
from prefect_torch_ddp.storage.protocol import ObjectPart, Readable

if TYPE_CHECKING:
    from torch import Tensor

NUM_AT_ONCE = 64
MIN_SAMPLES = 2  # one for each side
PARQUET_SUFFIXES = (".parquet", ".parq", ".pq")
_LOG = re.compile(
    r"(?P<above>(?:.*?/)?)(?:(?P<delta>_delta_log)/|(?P<hudi>\.hoodie)/|(?P<iceberg>metadata)/"
    r"(?:v\d+|\d+-[0-9a-f-]{36})(?:\.gz)?\.metadata\.json(?:\.gz)?$)"
)
"""The name of a file that says which files of a table count, and the table's folder."""
_FORMATS = {
    "delta": ("Delta Lake", "deltalake.DeltaTable({where!r}).file_uris()", "deletion vectors"),
    "hudi": (
        "Hudi",
        (
            "[{where!r} + '/' + each.base_file_relative_path()"
            " for each in hudi.HudiTable({where!r}).get_file_slices()]"
        ),
        "log files",
    ),
    "iceberg": (
        "Iceberg",
        "[task.file.file_path for task in iceberg_table.scan().plan_files()]",
        "delete files",
    ),
}
"""Each with a list of the files that count, in Python, and where rows are deleted one by one."""


@exported_by("prefect_torch_ddp.data")
def read_files(source: Readable, prefix: str = "") -> Iterator[tuple[str, bytes]]:
    """Yield (name, content) of all files whose name begins with a prefix, sorted by name.

    Reads 64 files at a time, and holds them in memory.

    Args:
        source: such as `ctx.source`.
        prefix: a folder with its slash, the beginning of a name, or a whole name.

    Raises:
        StorageError: a file can't be listed or read.

    Example:
        In `prepare`, copy the files of a folder:

            from prefect_torch_ddp.data import read_files

            for name, content in read_files(ctx.source, "cat/"):
                (ctx.data / name.replace("/", "_")).write_bytes(content)
    """
    listed = iter(source.list_objects(prefix))
    while parts := [
        ObjectPart(item.key, item.num_bytes, etag=item.etag) for item in islice(listed, NUM_AT_ONCE)
    ]:
        for part, content in zip(parts, source.read_many(parts), strict=True):
            if isinstance(content, StorageError):
                raise content
            yield part.key, content


def is_parquet(name: str) -> bool:
    """Tell whether a name is that of a Parquet file, and neither it nor a folder of it is hidden.

    Files and folders whose name begins with a dot or an underscore are left out, such as _SUCCESS
    and _metadata.
    """
    return name.lower().endswith(PARQUET_SUFFIXES) and not _is_hidden(name.strip("/"))


def refuse_log(name: str, uri: str) -> None:
    """Refuse a file of the log of a table that keeps files whose rows no longer count.

    They were replaced by others: all files of the folder have rows twice, or deleted ones.

    Args:
        name: of the file, below the folder whose Parquet files are read.
        uri: of that folder.

    Raises:
        InvalidParamsError: it is one; says how to list the files that count.
    """
    found = _LOG.match(name)
    if found is None or _is_hidden(found["above"]):
        return
    kind, files, deletes = _FORMATS[str(found.lastgroup)]
    where = f"{uri.rstrip('/')}/{found['above']}".rstrip("/")
    msg = (
        f"{where} is a table of {kind}, and {name} says which of its files count: to read all of "
        "them brings rows twice, and deleted rows. Give table() the list of the current files, "
        f"such as {files.format(where=where)}. If it has {deletes}, these files too have deleted "
        "rows, and it must be compacted first"
    )
    raise InvalidParamsError(msg)


def _is_hidden(name: str) -> bool:
    return any(part.startswith(("_", ".")) for part in name.split("/"))


def tables_in(source: Readable) -> DatasetReport:
    """Describe the Parquet files of a source as the dataset of a workload without `prepare`.

    Its digest is that of the names, sizes and ETags: no file is read. Tables of Delta Lake, Hudi
    and Iceberg are counted too: which files `train` reads isn't known here, and `table()` refuses
    their folders.

    Raises:
        InvalidParamsError: there is no Parquet file.
        StorageError: the source can't be listed.
    """
    digest, num_files, num_bytes = hashlib.sha256(source.identity.encode()), 0, 0
    for item in list_dataset(source):
        if is_parquet(item.key):
            row = repr((item.key, item.num_bytes, item.etag))
            digest.update(row.encode(errors="surrogatepass"))
            num_files, num_bytes = num_files + 1, num_bytes + item.num_bytes
    if not num_files:
        msg = (
            "a workload with no prepare trains on the Parquet files of its source, and there is "
            f"no Parquet file in {source.uri}: a name must end with {', '.join(PARQUET_SUFFIXES)}. "
            "Other data needs a function prepare(ctx)"
        )
        raise InvalidParamsError(msg)
    return DatasetReport(
        dataset_id=digest.hexdigest()[:16],
        uri=source.uri,
        num_files=num_files,
        num_bytes=num_bytes,
        digest=digest.hexdigest(),
    )


@exported_by("prefect_torch_ddp.data")
def seeded_split(
    num_samples: int,
    held_out: float,
    seed: int,
    targets: "Sequence[Hashable] | np.ndarray[Any, Any] | Tensor | None" = None,
) -> tuple[list[int], list[int]]:
    """Split sample indices into two sorted lists, always the same for the same arguments.

    Args:
        num_samples: at least 2.
        held_out: share of the samples in the second list, between 0 and 1; each list gets at
            least one sample.
        seed: not negative.
        targets: the class of each sample, in a list, or in a tensor, an array or a pandas Series of
            one dimension. Every class is then held out in the same share, as near as whole samples
            allow; the seed decides which of equal classes have one more. None: classes aren't
            considered.

    Raises:
        InvalidParamsError: no such split is possible.

    Example:
        Hold out a fifth of each class:

            from prefect_torch_ddp.data import seeded_split

            labels = ["cat"] * 50 + ["dog"] * 50
            train, test = seeded_split(len(labels), held_out=0.2, seed=0, targets=labels)
            print(len(train), len(test))  # 80 20
    """
    if num_samples < MIN_SAMPLES:
        msg = f"{num_samples} samples can't be split in two; at least {MIN_SAMPLES} are needed"
        raise InvalidParamsError(msg)
    if not 0 < held_out < 1:
        msg = f"held_out is {held_out}; it is a share of the samples, between 0 and 1"
        raise InvalidParamsError(msg)
    if seed < 0:
        msg = f"the split's seed is {seed}; it must not be negative"
        raise InvalidParamsError(msg)
    classes = [None] * num_samples if targets is None else _classes(targets, num_samples)
    members_of: dict[Hashable, list[int]] = {}  # classes in the order in which they first appear
    for index, each in enumerate(classes):
        members_of.setdefault(each, []).append(index)
    num_held_out = min(max(round(num_samples * held_out), 1), num_samples - 1)
    quotas = _apportion([len(members) for members in members_of.values()], num_held_out, seed)
    generator = np.random.default_rng(seed)
    held: set[int] = set()
    for members, num in zip(members_of.values(), quotas, strict=True):
        held.update(members[i] for i in generator.permutation(len(members))[:num].tolist())
    return [i for i in range(num_samples) if i not in held], sorted(held)


def _classes(targets: Any, num_samples: int) -> list[Hashable]:
    """Return the class of each sample as a plain value, by position.

    Tensors can't be classes themselves, since equal ones have different hashes.

    Raises:
        InvalidParamsError: there isn't one class per sample.
    """
    if getattr(targets, "ndim", 1) != 1:
        shape = tuple(targets.shape)
        msg = f"targets has the shape {shape}; give one class per sample, in one dimension"
        raise InvalidParamsError(msg)
    if len(targets) != num_samples:
        msg = f"targets has {len(targets)} classes for {num_samples} samples; give one per sample"
        raise InvalidParamsError(msg)
    # pandas takes an index in brackets as a label.
    values = targets.tolist() if hasattr(targets, "tolist") else targets
    classes = []
    for index in range(num_samples):
        value = values[index]
        if getattr(value, "ndim", 0):
            msg = f"targets[{index}] has the shape {tuple(value.shape)}; give one class per sample"
            raise InvalidParamsError(msg)
        classes.append(value.item() if hasattr(value, "ndim") else value)
    return classes


def _apportion(sizes: Sequence[int], num: int, seed: int) -> list[int]:
    """Share out `num` in proportion to the sizes, by largest remainder (Hamilton's method)."""
    total = sum(sizes)
    quotas = [size * num // total for size in sizes]
    # Of equal remainders the seed chooses. Its other draws don't depend on that.
    mixed = np.random.default_rng((seed, 1)).permutation(len(sizes)).tolist()
    by_remainder = sorted(mixed, key=lambda i: -(sizes[i] * num % total))
    for i in by_remainder[: num - sum(quotas)]:
        quotas[i] += 1
    return quotas
