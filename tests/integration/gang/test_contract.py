"""The contract of level 1: values, arguments, environment, slots and modes."""

import logging
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from distributed import Client

from prefect_torch_ddp import InvalidParamsError, RankFailedError, run_gang
from prefect_torch_ddp.protocol.rank import Launcher
from tests.support.gangs import own_cluster
from tests.workloads import plain


def test_process_group_is_up_and_environments_are_right(dask_client: Client) -> None:
    """Every rank has a process group and torchrun's variables; the workers' environment stays."""
    before = dask_client.run(lambda: dict(os.environ))
    assert run_gang(dask_client, plain.sum_of_ones, world_size=2) == [2.0, 2.0]
    assert run_gang(dask_client, "tests.workloads.plain:sum_of_ones") == [2.0, 2.0]
    for rank, env in enumerate(run_gang(dask_client, plain.environment, world_size=2, attempt=3)):
        assert all(name in env for name in plain.CONTRACT)
        assert env["RANK"] == env["LOCAL_RANK"] == env["ROLE_RANK"] == str(rank)
        assert env["TORCHELASTIC_RESTART_COUNT"] == "2"
        assert "TORCHELASTIC_USE_AGENT_STORE" not in env
        assert env["HOME"] == next(iter(before.values()))["HOME"]
    assert dask_client.run(lambda: dict(os.environ)) == before


def test_arguments_arrive_whatever_their_names(dask_client: Client) -> None:
    """Positional and keyword arguments arrive intact, and defaults stay."""
    kwargs = {"retries": 2, "rank": 3, "workers": 4, "world_size": 5}
    values = run_gang(dask_client, plain.awkward_names, args=(1,), kwargs=kwargs, world_size=1)
    assert values == [{"key": 1, **kwargs, "backend": "mine", "timeout": 1.5}]


@pytest.mark.parametrize("launcher", ["auto", "exec"])
def test_a_scripts_own_modules_come_before_installed_ones(
    dask_client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launcher: Launcher
) -> None:
    """A rank finds the caller's module in place of an installed package of the same name."""
    (tmp_path / "flows").mkdir()
    (tmp_path / "flows" / "__init__.py").touch()
    (tmp_path / "flows" / "deep.py").touch()
    where = "from flows import deep\ndef where(): return [__file__, deep.__file__]\n"
    (tmp_path / "iniconfig.py").write_text(where, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    (found,) = run_gang(dask_client, "iniconfig:where", world_size=1, launcher=launcher)
    assert found == [str(tmp_path / path) for path in ("iniconfig.py", "flows/deep.py")]


def test_values_come_back_in_rank_order(dask_client: Client) -> None:
    """Any picklable value makes the round trip, in rank order."""
    for rank, value in enumerate(run_gang(dask_client, plain.values, world_size=2)):
        assert value["defaultdict"]["absent"] == 0
        arrays = [value.pop(kind).tolist() for kind in ("numpy", "tensor")]
        assert arrays == [[rank] * 3, [rank] * 2]
        assert value == {
            "none": None,
            "defaultdict": {"a": rank, "absent": 0},
            "dataclass": plain.Point(rank),
            "nested": {"loss": [rank, (rank, {"x": rank})]},
        }


def test_closure_over_big_data_and_lambda(dask_client: Client) -> None:
    """A closure over 20 MB and a lambda arrive."""
    big = bytes(20_000_000)

    def size() -> int:
        return len(big)

    assert run_gang(dask_client, size, world_size=2) == [20_000_000] * 2
    assert run_gang(dask_client, lambda x: x + 1, args=(1,), world_size=1) == [2]


SCRIPT = """
import sys, torch.distributed as dist
if __name__ == "__main__":
    dist.init_process_group("gloo")
    open(f"{sys.argv[1]}/{dist.get_rank()}", "w").write(sys.argv[2])
    dist.barrier()
    sys.exit(0)
"""


def test_user_mode_runs_torchrun_code_unchanged(dask_client: Client, tmp_path: Path) -> None:
    """A function or script may initialise the process group itself; exit code 0 is success."""
    call = {"world_size": 2, "process_group": "user"}
    assert run_gang(dask_client, plain.torchrun_style, **call) == [2.0, 2.0]
    script = tmp_path / "train.py"
    script.write_text(SCRIPT, encoding="utf-8")
    assert run_gang(dask_client, str(script), args=(tmp_path, 7), **call) == [None, None]
    assert [(tmp_path / str(rank)).read_text() for rank in (0, 1)] == ["7", "7"]


def test_nccl_without_cuda_says_what_is_missing(dask_client: Client) -> None:
    """On a CPU machine the error for nccl names the missing part."""
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    with pytest.raises(RankFailedError, match=r"backend 'nccl' can't be used on .*CUDA"):
        run_gang(dask_client, plain.sum_of_ones, world_size=2, backend="nccl")


@pytest.mark.extended
@pytest.mark.parametrize(("context", "total"), [("fork", 295), ("spawn", 285)])
def test_dataloader_workers_inside_a_rank(dask_client: Client, context: str, total: int) -> None:
    """DataLoader workers run by fork, with a lambda, and by spawn, without a Dask setting."""
    values = run_gang(dask_client, plain.load_with_workers, args=(context,), world_size=1)
    assert values == [total]


@pytest.mark.extended
def test_text_arrives_whatever_the_workers_encoding(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A rank writes UTF-8 whatever the locale is, and its records keep their level and logger."""
    for name, value in (("PYTHONIOENCODING", "latin-1"), ("LC_ALL", "C"), ("PYTHONUTF8", "0")):
        monkeypatch.setenv(name, value)
    printed = "grün \U0001f600 lone \\udcfc", "häßlich \U0001f600"
    wanted = {*((20, text) for text in printed), (30, "user.code: größer \U0001f600")}
    with own_cluster(1) as (_, client), caplog.at_level(logging.INFO, "prefect_torch_ddp.ranks"):
        for launcher in ("auto", "exec"):
            caplog.clear()
            run_gang(client, plain.speak_many_tongues, world_size=1, launcher=launcher)
            said = {(each.levelno, each.message[len("[rank 0] ") :]) for each in caplog.records}
            assert wanted <= said, launcher


def test_rank_0_may_return_first(dask_client: Client) -> None:
    """The peers of rank 0 may use its store and make groups after its function returned."""
    assert run_gang(dask_client, plain.meet_after_rank_0_returned, world_size=2) == [0, 1]


@pytest.mark.parametrize(
    "hows",
    [
        ("closes_stdout", "no_death_signal"),
        ("thread", "handlers", "folder", "logs_much"),
        ("faulthandler", "other_group", "holds_stdout"),
        ("leaves_a_writer",),
    ],
    ids=", ".join,
)
def test_odd_functions_end_well(
    dask_client: Client, caplog: pytest.LogCaptureFixture, hows: tuple[str, ...]
) -> None:
    """Leftovers of a function hold up neither its value nor the next gang."""
    with caplog.at_level(logging.INFO, logger="prefect_torch_ddp.ranks"):
        for _ in range(2):
            assert run_gang(dask_client, plain.end_well_oddly, args=hows, world_size=2) == [9, 9]
    assert ("] user.code: \U0001f600" in caplog.text) == ("logs_much" in hows)


def test_ten_in_a_row_and_twice_means_twice(dask_client: Client) -> None:
    """Ten gangs run in a row, and the same call twice runs in fresh processes twice."""
    pids = [pid for _ in range(10) for pid in run_gang(dask_client, plain.process_id, world_size=2)]
    assert len(set(pids)) == 20


@pytest.mark.extended
def test_six_gangs_at_once_on_two_workers_with_two_threads() -> None:
    """Six gangs that are submitted at once to 2 workers x 2 threads all end without a deadlock."""
    with own_cluster(2, threads_per_worker=2) as (_, client), ThreadPoolExecutor(6) as pool:
        gangs = [pool.submit(run_gang, client, plain.sum_of_ones, world_size=2) for _ in range(6)]
        assert [gang.result() for gang in gangs] == [[2.0, 2.0]] * 6


NO_RESOURCES = ({"GPU": 0}, {"GPU": "1"}, {1: 1}, ["GPU"])


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"world_size": 0}, "world_size is 0"),
        ({"world_size": True}, "world_size is True"),
        ({"ranks_per_worker": -1}, "ranks_per_worker is -1"),
        ({"backend": "mpi"}, "backend is 'mpi'; choose one of auto, gloo, nccl"),
        ({"process_group": "mine"}, "process_group is 'mine'"),
        ({"args": "abc"}, "args is 'abc'; give a sequence"),
        ({"kwargs": {1: 2}}, "kwargs is"),
        ({"fn": "no colon here"}, "give a callable"),
        ({"workers_timeout_s": 0}, "workers_timeout_s is 0"),
        ({"queue_timeout_s": float("inf")}, "queue_timeout_s is inf"),
        (
            {"process_group": "user", "collective_timeout_s": 5.0},
            "collective_timeout_s is 5, but with process_group=.user. your code makes the group",
        ),
        ({"args": (threading.Lock(),)}, r"args\[0\] can't be sent to the ranks: TypeError"),
        ({"args": (1,)}, r"sum_of_ones\(\) can't be called on the ranks: too many positional"),
        ({"args": lambda attempt: (attempt,)}, r"sum_of_ones\(\) can't be called on the ranks"),
        *(({"resources": wrong}, r"resources(\.\S+)? is") for wrong in NO_RESOURCES),
        *(({"interface": wrong}, "interface is") for wrong in ("", 7, "10.1.0.0/33", "eth0/1")),
        ({"max_restarts": -1}, "max_restarts is -1"),
        ({"min_world_size": 0}, "min_world_size is 0"),
        ({"min_world_size": 3}, "min_world_size is 3 and world_size 1"),
        ({"max_world_size": 1, "world_size": 2}, "max_world_size is 1 and world_size 2; give a"),
        (
            {"max_world_size": 2, "min_world_size": 3, "world_size": None},
            "max_world_size is 2 and min_world_size 3",
        ),
        ({"max_world_size": 2}, "max_world_size is 2, but fn takes no RankContext"),
        ({"world_size_divides": 0}, "world_size_divides is 0"),
        ({"world_size": 2, "world_size_divides": 3}, "world_size is 2 and has to divide 3"),
        (
            {"world_size": None, "world_size_divides": 2, "min_world_size": 3},
            "min_world_size is 3, and the number of ranks has to divide 2",
        ),
    ],
)
def test_bad_input_is_refused_before_anything_starts(
    dask_client: Client, wrong: dict[str, Any], says: str
) -> None:
    """A wrong argument is named, with its value and what to do."""
    with pytest.raises(InvalidParamsError, match=says):
        run_gang(**{"client": dask_client, "fn": plain.sum_of_ones, "world_size": 1, **wrong})
