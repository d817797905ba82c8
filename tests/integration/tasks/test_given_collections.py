"""A Dask collection among a ddp_task's arguments reaches the function as a dataset."""

import inspect
import json
import logging
import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import dask.array as da
import dask.bag as db
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
import xarray as xr
from dask import delayed
from distributed import Lock
from prefect import flow
from prefect.runtime import flow_run
from prefect_dask import DaskTaskRunner

from prefect_torch_ddp import InvalidParamsError, StorageError, ddp_script, ddp_task
from prefect_torch_ddp.data import array, table
from prefect_torch_ddp.data.datasets.dataset_store import find_dataset
from prefect_torch_ddp.protocol.call import Call
from prefect_torch_ddp.records.ledger import read_ledger
from prefect_torch_ddp.records.run_record import list_run_records
from prefect_torch_ddp.storage.directory import DirectoryStorage
from prefect_torch_ddp.tasks.calls.submitting import submitting
from prefect_torch_ddp.tasks.gangs.given import GivenCollections
from prefect_torch_ddp.tasks.watch.terminal import Display, Teller
from tests.support.runs import report_of
from tests.support.waiting import wait_until
from tests.unit.data.test_loader import loader_of
from tests.workloads.dask_parts import META, failing_part, grids, held_part, part
from tests.workloads.given_rows import fit

pytestmark = pytest.mark.timeout(200)
logger = logging.getLogger("test")
NUMBERS = [n for n in range(600) if not 200 <= n < 300]


def frame(make: Any = part, num: int = 6) -> Any:
    """Return a Dask DataFrame of as many partitions."""
    return dd.from_map(make, range(num), meta=META)


def dicts(numbers: Any) -> Any:
    """Return a Bag of dicts."""
    return db.from_sequence(numbers, npartitions=2).map(lambda number: {"number": number})


def function(rows: Any, *more: Any, **others: Any) -> None:
    """Take what a call gives."""


def given(*args: Any, **kwargs: Any) -> GivenCollections:
    """Return the collections of a call."""
    return GivenCollections.in_call(Call(function, args, kwargs), inspect.signature(function))


def ids(*args: Any, **kwargs: Any) -> list[str]:
    """Return the names of a call's datasets."""
    return [name.dataset_id for name in given(*args, **kwargs).found]


def test_equal_collections_have_one_name_and_others_have_others() -> None:
    """The name depends on what Dask computes, and on how xarray is to store it."""
    sent = cloudpickle.loads(cloudpickle.dumps(frame()))
    assert ids(frame()) == ids(sent) == ids(others=[frame(), {"a": frame()}], rows=1)
    scaled = grids()
    scaled["t2m"].encoding = {"dtype": "int16", "scale_factor": 0.1}
    several = [frame(), frame(num=5), frame()[["number"]], grids(), scaled, grids().t2m.data]
    several += [dicts(range(4)), dicts(range(5))]
    assert ids(dicts([1, 2])) == ids(dicts([1, 2]))
    assert len({*ids(*several)}) == len(several)


def test_a_name_depends_on_the_code_of_the_users_functions(tmp_path, monkeypatch) -> None:
    """Functions of the user's modules count by their code, apart from comments and layout."""
    monkeypatch.syspath_prepend(tmp_path)
    code = "def clean(part):\n    return part[part.number > {}]\n"
    found = []
    for limit, comment in ((1, ""), (1, "# why\n"), (2, "")):
        (tmp_path / "own_cleaning.py").write_text(comment + code.format(limit), encoding="utf-8")
        sys.modules.pop("own_cleaning", None)
        import own_cleaning

        found.append(ids(frame().map_partitions(own_cleaning.clean)))
    assert found[0] == found[1] != found[2]
    frames = frame().map_partitions(own_cleaning.clean)
    (tmp_path / "own_cleaning.py").unlink()  # as of a module that was made for a while
    assert ids(frames)[0] not in found[2]
    sys.modules.pop("own_cleaning")


@pytest.mark.parametrize(
    "read",
    [
        lambda file: dd.from_map(pd.read_json, [f"file://{file}"], meta=pd.DataFrame({"a": [1]})),
        lambda file: dd.from_map(pd.read_json, [file], meta=pd.DataFrame({"a": [1]})),
        lambda file: db.read_text(str(file)).map(json.loads).to_dataframe(meta={"a": "int64"}),
        lambda file: dd.from_delayed(
            delayed(pd.read_json, pure=True)(str(file)), meta=pd.DataFrame({"a": [1]})
        ),
    ],
    ids=["an address", "a path", "a Bag of texts", "a Delayed"],
)
def test_a_name_depends_on_the_files_that_a_collection_names(read, tmp_path) -> None:
    """Dask's token alone has only their names, so that a changed file would go unnoticed."""
    file = tmp_path / "rows.json"

    def name_now(content: str, changed_s: int) -> str:
        file.write_text(content, encoding="utf-8")
        os.utime(file, (changed_s, changed_s))
        (found,) = ids(read(file))
        return found

    first = name_now('[{"a": 1}]', 1)
    assert name_now('[{"a": 1}]', 1) == first
    assert len({first, name_now('[{"a": 2}]', 2), name_now('[{"a": 10}]', 2)}) == 3


@pytest.mark.parametrize("zarr_format", [2, 3])
@pytest.mark.parametrize(
    "read",
    [
        partial(xr.open_zarr, consolidated=False),
        lambda store: xr.open_zarr(store, consolidated=False).rolling(x=2).mean(),
        lambda store: da.from_zarr(store, component="t"),
        lambda store: da.from_zarr(f"file://{store}/t"),
    ],
    ids=["open_zarr", "a mean of it", "from_zarr", "an address"],
)
def test_a_name_depends_on_the_chunks_of_a_zarr_store(read, zarr_format, tmp_path) -> None:
    """Only the listing of a store shows that one of its chunks was written again."""
    values = xr.Dataset({"t": (("x",), np.arange(8.0))})
    store = tmp_path / "t.zarr"
    values.to_zarr(
        store, zarr_format=zarr_format, consolidated=False, encoding={"t": {"chunks": (4,)}}
    )
    (chunk,) = [path for path in store.rglob("1") if path.is_file()]

    def name_now() -> str:
        (found,) = ids(read(str(store)))
        return found

    first = name_now()
    assert name_now() == first
    os.utime(chunk, (1, 1))
    changed = name_now()
    chunk.unlink()
    assert len({first, changed, name_now()}) == 3


def test_a_name_depends_on_what_is_linked_in_a_zarr_store(tmp_path) -> None:
    """Its arrays may lie elsewhere, a link may lead into a circle, and another to nothing."""
    store, elsewhere = tmp_path / "t.zarr", tmp_path / "disk/t"
    values = xr.Dataset({"t": (("x",), np.arange(8.0))})
    values.to_zarr(store, zarr_format=3, consolidated=False, encoding={"t": {"chunks": (4,)}})
    elsewhere.parent.mkdir()
    (store / "t").rename(elsewhere)
    (store / "t").symlink_to(elsewhere)
    (chunk,) = elsewhere.rglob("1")

    def name_now() -> str:
        (found,) = ids(xr.open_zarr(store, consolidated=False))
        return found

    first = name_now()
    os.utime(chunk, (1, 1))
    changed = name_now()
    (store / "t/again").symlink_to(store)
    (store / "t/gone").symlink_to(tmp_path / "nothing")
    (store / "t/itself").symlink_to("itself")
    linked = name_now()
    assert linked == name_now()
    os.utime(chunk, (2, 2))
    assert len({first, changed, linked, name_now()}) == 4


def test_other_arguments_stay_as_they_are() -> None:
    """A call without collections is the same call, and what xarray holds in memory is a value."""
    call = Call(function, (1, grids().compute(scheduler="sync")), {"a": [2]})
    collections = GivenCollections.in_call(call, inspect.signature(function))
    assert collections.call is call
    assert not collections.found


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ((db.from_sequence([1]).sum(),), "rows of function is a dask.bag.*Item; .* one of them"),
        ((1, frame()["half"]), "more of function is a dask.*Series; .* make one of them"),
        ((frame()[["half"]].to_dask_array(),), "rows of function is .*to_dask_array.lengths=True"),
    ],
)
def test_collections_that_make_no_dataset_are_refused_by_name(args, says) -> None:
    """The error names the argument."""
    with pytest.raises(InvalidParamsError, match=says):
        given(*args)


def test_a_script_gets_no_collection(tmp_path) -> None:
    """It would get a text; the error comes before any rank starts."""
    says = r"train\.py is given a dask\.dataframe\.\S+DataFrame, .* text: .*ddp_task.*folder"
    for options in ({"args": [frame()]}, {"resume_args": ["--more", frame()]}):
        with pytest.raises(InvalidParamsError, match=says):
            ddp_script("train.py", **options)
    call = Call(ddp_script("train.py").fn, ("--rows", frame()))
    with pytest.raises(InvalidParamsError, match=says):
        GivenCollections.in_call(call, inspect.signature(call.fn))


def test_a_storage_that_cant_be_written_to_is_refused_with_the_argument() -> None:
    """The error names the argument and the option."""
    with pytest.raises(StorageError, match=r"Dask workers .*\(rows\).*ddp_task\(storage="):
        given(frame()).check_writable(DirectoryStorage("/proc/runs"))
    with pytest.raises(StorageError) as plain:
        given(1).check_writable(DirectoryStorage("/proc/runs"))
    assert "Dask workers" not in str(plain.value)


def test_datasets_take_the_places_of_collections(storage, client, caplog) -> None:
    """Each is computed once, and read where it lies."""
    caplog.set_level("INFO")
    kwargs = {"grid": grids(), "again": frame(), "dicts": dicts(range(4))}
    call = given([frame()], 2, **kwargs).computed(client, storage, logger)
    (rows,), two = call.args
    assert two == 2
    assert [*call.kwargs] == [*kwargs]
    read = table(rows, columns=["number"])
    (batch,) = loader_of(read, len(read), shuffle=False)
    assert batch["number"].tolist() == NUMBERS
    assert call.kwargs["again"].uri == rows.uri
    assert len(array(call.kwargs["grid"], "t2m", nan=0.0)) == 14
    assert table(call.kwargs["dicts"], columns=["number"]).categories == {}
    assert caplog.text.count("computed as dataset") == 3
    (name,) = given(frame()).found
    assert find_dataset(storage, name.dataset_id).num_files == 5


def test_what_is_stored_isnt_computed_again(client, tmp_path, caplog) -> None:
    """A retry, or another call, finds the dataset."""
    caplog.set_level("INFO")
    storage = DirectoryStorage(tmp_path)
    first, again = (given(frame()).computed(client, storage, logger).args[0] for _ in range(2))
    assert first == again
    assert caplog.text.count("prepared 6 of 6 partitions") == 1
    assert "is already at" in caplog.text


def test_a_bucket_whose_content_doesnt_count_is_named(client, s3_server, tmp_path, caplog) -> None:
    """If a dataset of a Zarr store in a bucket is used again, a warning says how to renew it."""
    caplog.set_level(logging.WARNING)
    bucket, storage = s3_server.storage(), DirectoryStorage(tmp_path)
    da.arange(8, chunks=4).to_zarr(
        f"{bucket.uri}/raw.zarr", storage_options=bucket.storage_options, zarr_format=3
    )
    raw = da.from_zarr(f"{bucket.uri}/raw.zarr", storage_options=bucket.storage_options)
    given(raw).computed(client, storage, logger)
    assert not [each for each in caplog.records if each.name == logger.name]
    given(raw).computed(client, storage, logger)
    (name,) = given(raw).found
    says = f"argument rows: only the address of .*/raw.zarr.* delete (.*{name}/manifest.json)"
    (found,) = [match for each in caplog.messages if (match := re.match(says, each))]
    assert Path(found[1]).is_file()
    Path(found[1]).unlink()
    assert find_dataset(storage, str(name)) is None


def test_a_frame_that_pyarrow_reads_is_sent_and_written(client, tmp_path) -> None:
    """What Dask knows of its files is of a class that pyarrow can't pickle."""
    pd.DataFrame({"number": range(5)}).to_parquet(tmp_path / "rows.parquet")
    rows = dd.read_parquet(tmp_path, filesystem="arrow")
    with submitting(function, (rows,), {}):
        sent = cloudpickle.loads(cloudpickle.dumps(rows))
    assert ids(sent) == ids(rows)
    call = given(sent + 1).computed(client, DirectoryStorage(tmp_path / "s"), logger)
    (batch,) = loader_of(table(call.args[0]), 5, shuffle=False)
    assert batch["number"].tolist() == [1, 2, 3, 4, 5]


def test_calls_at_the_same_time_compute_a_collection_once(client, tmp_path, caplog) -> None:
    """The others wait, and find the dataset."""
    caplog.set_level("INFO")
    storage = DirectoryStorage(tmp_path)
    (name,) = given(frame()).found

    def compute(_: int) -> str:
        return given(frame()).computed(client, storage, logger).args[0].uri

    lock = Lock(f"prefect-torch-ddp {storage.uri} {name.dataset_id}")
    waits = f"another task prepares dataset {name.dataset_id}"
    with ThreadPoolExecutor(3) as pool:
        with lock:
            computed = pool.map(compute, range(3))
            wait_until(lambda: caplog.text.count(waits) == 3)
        assert len({*computed}) == 1
    assert caplog.text.count("prepared 6 of 6 partitions") == 1
    assert not lock.locked()


def test_persisted_collections_are_datasets_too(client, tmp_path) -> None:
    """What Dask holds in its workers' memory is written from there."""
    held = [client.persist(each) for each in (frame(), grids(), grids().t2m.data)]
    call = given(*held).computed(client, DirectoryStorage(tmp_path), logger)
    rows, group, values = call.args
    assert len(table(rows, columns=["number"])) == len(NUMBERS)
    assert len(array(group, "t2m", nan=0.0)) == len(array(values, nan=0.0)) == 14


def test_the_terminal_shows_how_far_it_is(client, tmp_path) -> None:
    """While the partitions are computed."""
    held = given(frame(partial(held_part, folder=str(tmp_path))))
    with Display("fit") as display, ThreadPoolExecutor(1) as pool:
        storage, show = DirectoryStorage(tmp_path / "s"), Teller().show
        computing = pool.submit(held.computed, client, storage, logger, show=show)
        try:
            wait_until(
                lambda: display._as_line() == "fit: 0 % · prepared 0 of 6 partitions, 0 bytes"
            )
        finally:
            (tmp_path / "release").touch()
        computing.result()


def test_a_frame_without_rows_is_refused_with_the_argument(client, tmp_path) -> None:
    """The words are of rows, and not of a storage."""
    with pytest.raises(InvalidParamsError, match="argument rows: the Dask DataFrame has no rows"):
        empty = frame()[frame().number < 0]
        given(empty).computed(client, DirectoryStorage(tmp_path), logger)


def test_a_bag_of_others_is_refused_with_the_argument(client, tmp_path) -> None:
    """What a Bag has is known when a worker has computed a partition."""
    with pytest.raises(InvalidParamsError, match=r"argument more: item 0 of partition [01] .* int"):
        bag = db.from_sequence([1, 2], npartitions=2)
        given(1, bag).computed(client, DirectoryStorage(tmp_path), logger)


def test_what_computing_raises_is_the_users_error(client, tmp_path) -> None:
    """No dataset is left: what a worker was just writing is no part of one."""
    storage, failing = DirectoryStorage(tmp_path), given(frame(failing_part))
    with pytest.raises(ValueError, match="partition 1 can't be cleaned") as raised:
        failing.computed(client, storage, logger)
    number, argument = raised.value.__notes__
    assert number == "raised while number 1 of the partitions was computed, counted from 0"
    assert argument.startswith("raised while the argument rows, a dask.dataframe.")
    assert [find_dataset(storage, name.dataset_id) for name in failing.found] == [None]


@pytest.mark.extended
@pytest.mark.usefixtures("prefect_api")
def test_a_task_trains_on_a_collection_and_its_retry_resumes(dask_cluster, tmp_path: Path) -> None:
    """Ranks load no Dask, and an equal collection is the same training of a `run_key`."""
    train = ddp_task(
        world_size=2, retries=1, storage=str(tmp_path), ledger=True, run_key="on-{rows}"
    )(fit)

    @flow(task_runner=DaskTaskRunner(address=dask_cluster.scheduler_address))
    def twice() -> list[Any]:
        return [train.submit(frame()).result(), train.submit(rows=frame()).result()]

    first, again = twice()
    (name,) = given(frame()).found
    assert first == {**again, "attempt": 2}
    assert first["rows"] == len(NUMBERS)
    assert not first["has_dask"]
    assert name.dataset_id in first["run_id"]
    storage = DirectoryStorage(tmp_path)
    report = read_ledger(storage, first["run_id"])
    assert report.is_clean
    newest = list_run_records(storage)[-1]
    assert newest.arguments["rows"] == {"dataset_id": name.dataset_id, "kind": name.kind}
    assert len(list(tmp_path.rglob("*.parquet"))) == 5


@pytest.mark.extended
@pytest.mark.usefixtures("prefect_api")
def test_a_tasks_page_shows_how_far_its_collection_is(dask_cluster, tmp_path: Path) -> None:
    """While the workers compute it; the training's report then takes the page over."""
    train = ddp_task(world_size=1, retries=1, storage=str(tmp_path / "s"))(fit)

    @flow(task_runner=DaskTaskRunner(address=dask_cluster.scheduler_address))
    def once() -> Any:
        training = train.submit(frame(partial(held_part, folder=str(tmp_path))))
        try:
            wait_until(lambda: "prepared 0 of 6 partitions" in report_of(flow_run.id))
        finally:
            (tmp_path / "release").touch()
        training.result()
        return flow_run.id

    page = report_of(once())
    assert page.startswith("# fit: finished")
