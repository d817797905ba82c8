"""What Dask computes and writes of a Bag: its partitions, which have to agree on what they have."""

from collections.abc import Sequence
from typing import Any

from dask.delayed import delayed

from prefect_torch_ddp.data.arrays.statistics import merged, statistics_key
from prefect_torch_ddp.data.arrays.writing import file_of
from prefect_torch_ddp.data.bags.forms import BagForm, DictRows, Stack, joined
from prefect_torch_ddp.data.bags.writing import rewrite_rows, write_items
from prefect_torch_ddp.data.datasets.dataset_manifest import DatasetFile, Written
from prefect_torch_ddp.storage.protocol import Storage
from prefect_torch_ddp.tasks.gangs.collection_writers import CollectionWriter, files_of


class BagWriter(CollectionWriter):
    """The partitions of a Dask Bag.

    Args:
        bag: the Bag. Whether it has dicts or arrays is known once a partition is written.
        storage: of the dataset.
        files_key: the folder of its files.
    """

    unit = "partitions"

    def __init__(self, bag: Any, storage: Storage, files_key: str) -> None:
        self._storage, self._files_key = storage, files_key
        self._form: BagForm | None = None
        write = delayed(write_items, pure=False)
        partitions = bag.to_delayed()
        self.writes = [write(each, storage, files_key, i) for i, each in enumerate(partitions)]

    def take(self, number: int, written: Written) -> None:
        """Refuse a partition that doesn't fit those before it."""
        del number  # its form has it
        if (form := written.about) is not None:
            self._form = form if self._form is None else joined(self._form, form)

    def again(self, written: Sequence[Written]) -> CollectionWriter | None:
        """Return the partitions of dicts that lack columns or have types of their own."""
        if not isinstance(self._form, DictRows):
            return None
        again = _Rewritten(self._form, self._storage, self._files_key, written)
        return again if again.writes else None

    def files(self, written: Sequence[Written]) -> list[DatasetFile]:
        """Write the statistics of arrays; return the files of the dataset.

        Raises:
            InvalidParamsError: the Bag is empty.
        """
        files = files_of(written, "the Dask Bag has no items")
        if isinstance(self._form, Stack) and self._form.statistics is not None:
            statistics = merged(each.about.statistics for each in written if each.files)
            key, content = statistics_key("values"), statistics.to_bytes()
            self._storage.write(f"{self._files_key}/{key}", content)
            files.append(file_of(key, content))
        return files


class _Rewritten(CollectionWriter):
    """The partitions of dicts that are written again, with the columns that all have."""

    unit = "partitions again"

    def __init__(
        self, form: DictRows, storage: Storage, files_key: str, written: Sequence[Written]
    ) -> None:
        types = {key: type_ for key, (type_, _) in form.columns.items()}
        rewrite = delayed(rewrite_rows, pure=False)
        self._kept: list[DatasetFile] = []
        self.writes = []
        for number, each in enumerate(written):
            if each.about is None or each.about.fits(form):
                self._kept += each.files
            else:
                (file,) = each.files
                self.writes.append(rewrite(file.key, storage, files_key, number, types))

    def files(self, written: Sequence[Written]) -> list[DatasetFile]:
        """Return the files of the dataset; those that they replace are removed with other rests."""
        return [*self._kept, *(file for each in written for file in each.files)]
