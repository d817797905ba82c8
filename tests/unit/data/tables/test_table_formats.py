"""Folders of Delta Lake, Hudi and Iceberg, which keep files whose rows no longer count."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from prefect_torch_ddp.data import table
from prefect_torch_ddp.data.preparing import tables_in
from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.storage.directory import DirectoryStorage
from prefect_torch_ddp.storage.protocol import Contents, ListedObject, ObjectPart, Readable
from tests.unit.data.tables.parquet_files import numbered

UUID = "56b61ee3-16f9-4f4e-b845-f6435a86b798"
LOGS = {
    "_delta_log/00000000000000000000.json": ("Delta Lake", "DeltaTable({where!r}).file_uris()"),
    ".hoodie/hoodie.properties": ("Hudi", "HudiTable({where!r}).get_file_slices()"),
    ".hoodie/timeline/20250101.commit": ("Hudi", "HudiTable({where!r}).get_file_slices()"),
    f"metadata/00000-{UUID}.metadata.json": ("Iceberg", "in iceberg_table.scan().plan_files()"),
    f"metadata/00012-{UUID}.gz.metadata.json": ("Iceberg", "in iceberg_table.scan().plan_files()"),
    "metadata/v3.metadata.json": ("Iceberg", "in iceberg_table.scan().plan_files()"),
}


@dataclass(frozen=True)
class Listings(Readable):
    """A folder that notes each listing."""

    folder: DirectoryStorage
    asked: list[str]

    @property
    def uri(self) -> str:
        return self.folder.uri

    def read_many(self, parts: Sequence[ObjectPart]) -> Contents:
        return self.folder.read_many(parts)

    def list_objects(self, prefix: str) -> Iterator[ListedObject]:
        self.asked.append(prefix)
        return self.folder.list_objects(prefix)


def put(folder: Path, name: str) -> None:
    """Write an empty object, with the folders above it."""
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).touch()


@pytest.mark.parametrize("name", LOGS)
def test_a_folder_whose_log_says_which_files_count_is_refused(tmp_path: Path, name: str) -> None:
    """Whether it is the table, or has it in it, by any way to it; the files by name are read."""
    where = numbered(tmp_path / "lake/trips", [8, 8], 8)
    put(where, name)
    kind, way_out = LOGS[name]
    said = f"{re.escape(str(where))} is a table of {kind}.*rows twice.*"
    said += f"{re.escape(way_out.format(where=str(where)))}.*deleted.*compacted first"
    source = DirectoryStorage(tmp_path)
    for given, storage in ((where, None), (tmp_path, None), (source, None), ("lake/trips", source)):
        with pytest.raises(InvalidParamsError, match=said):
            table(given, storage=storage)
    assert tables_in(source).num_files == 2  # which reads no rows, and refuses nothing
    assert len(table(where / "001.parquet")) == 8
    assert len(table([where / "001.parquet", where / "000.parquet"])) == 16


@pytest.mark.parametrize(
    "name",
    [
        "metadata/columns.metadata.json",
        "metadata/about.json",
        "metadata/2024.metadata.json",
        "my_metadata/v3.metadata.json",
        "_old/_delta_log/0.json",
        ".trash/.hoodie/hoodie.properties",
        "_delta_log",
        "x_delta_log/0.json",
        "part=1/.hoodie_partition_metadata",
    ],
)
def test_other_names_are_no_log(tmp_path: Path, name: str) -> None:
    """A folder `metadata`, and logs of tables in hidden folders, whose files aren't read."""
    numbered(tmp_path, [8, 8], 8)
    put(tmp_path, name)
    assert len(table(tmp_path)) == 16
    assert tables_in(DirectoryStorage(tmp_path)).num_files == 2


def test_files_may_be_uris_as_the_tables_give_them(tmp_path: Path) -> None:
    """Those of Iceberg have names with %, as they are; others write %20 for a space."""
    where = numbered(tmp_path / "my lake/city=a%2Fb", [8, 16], 8)
    paths = [where / "001.parquet", where / "000.parquet"]
    for uris in (
        [f"file://{path}" for path in paths],
        [f"file:{path}" for path in paths],
        [f"FILE://localhost{path}" for path in paths],
        [path.as_uri() for path in paths],
    ):
        for storage in (None, DirectoryStorage(tmp_path)):
            read = table(uris, storage=storage).rows.files  # type: ignore[union-attr]
            assert [file.uri for file in read] == [str(path) for path in paths]
    assert len(table(where.as_uri())) == len(table(f"file://{where}")) == 24


@dataclass(frozen=True)
class AtUri(Listings):
    """A folder whose URI begins with file://, as a storage of another package may have it."""

    @property
    def uri(self) -> str:
        return f"file://{self.folder.uri}"


def test_a_uri_below_the_storages_own_is_a_path_in_it(tmp_path: Path) -> None:
    """Also if that begins with file://; a path beside it is another place."""
    where = numbered(tmp_path / "lake/a", [8], 8)
    storage = AtUri(DirectoryStorage(tmp_path / "lake"), [])
    for given in (f"file://{where}", f"file://{where}/000.parquet", "a", f"file://{tmp_path}/lake"):
        assert len(table(given, storage=storage)) == 8
    assert len(table([f"file://{where}/000.parquet"], storage=storage)) == 8
    with pytest.raises(InvalidParamsError, match=f"^file://{where}2 isn't in the storage"):
        table(f"file://{where}2", storage=AtUri(DirectoryStorage(where), []))


def test_a_file_on_another_host_is_refused(tmp_path: Path) -> None:
    """Without its name, which may have a password."""
    said = "a file:// URI of another host, with the path /lake/a.parquet"
    with pytest.raises(InvalidParamsError, match=said) as raised:
        table(["file://u:hunter2@host/lake/a.parquet"])
    assert "hunter2" not in str(raised.value)
    with pytest.raises(InvalidParamsError, match=r"no Parquet file in /.*/b c\.parquet"):
        table((tmp_path / "b c.parquet").as_uri())


def test_a_log_of_a_neighbour_does_not_count(tmp_path: Path) -> None:
    """Its name begins with that of the folder that is read."""
    numbered(tmp_path / "a.parquet", [8], 8)
    put(tmp_path, "a.parquet.old/_delta_log/0.json")
    assert len(table(tmp_path / "a.parquet")) == 8
    assert len(table("a.parquet", storage=DirectoryStorage(tmp_path))) == 8


def test_to_find_a_log_nothing_more_is_listed(tmp_path: Path) -> None:
    """It is in the listing of the files."""
    source = Listings(DirectoryStorage(numbered(tmp_path, [8, 8], 8)), [])
    table(source)
    assert source.asked == [""]
    put(tmp_path, "_delta_log/0.json")
    with pytest.raises(InvalidParamsError, match="Delta Lake"):
        table(source)
    assert source.asked == ["", ""]
