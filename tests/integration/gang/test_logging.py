"""A script owns the root logger of its rank, and this package's loggers stay audible."""

import logging
from pathlib import Path

import pytest
from distributed import Client

from prefect_torch_ddp import run_gang
from prefect_torch_ddp.protocol.rank import Launcher
from tests.support.gangs import said_by_ranks

SCRIPT = """
import logging, sys
logging.getLogger("nobodys").warning("unhandled")
logging.getLogger("nobodys").info("too low")
logging.basicConfig(filename=sys.argv[1], level=logging.DEBUG, format="%(levelname)s %(message)s")
logging.getLogger("mine").debug("a detail")
logging.getLogger().addHandler(logging.StreamHandler(sys.stdout))
logging.getLogger("mine").info("said once")
"""


@pytest.mark.parametrize("launcher", ["auto", "exec"])
def test_the_root_logger_of_a_script_is_its_own(
    dask_client: Client, tmp_path: Path, caplog: pytest.LogCaptureFixture, launcher: Launcher
) -> None:
    """`basicConfig` writes its file from DEBUG up, and a handler's lines come once."""
    script, log = tmp_path / "train.py", tmp_path / "train.log"
    script.write_text(SCRIPT, encoding="utf-8")
    with caplog.at_level(logging.INFO, "prefect_torch_ddp.ranks"):
        call = {"args": (log,), "world_size": 1, "launcher": launcher}
        run_gang(dask_client, str(script), **call, process_group="user")  # type: ignore[arg-type]
    assert log.read_text().splitlines() == ["DEBUG a detail", "INFO said once"]
    assert sorted(said_by_ranks(caplog)) == ["[rank 0] nobodys: unhandled", "[rank 0] said once"]
    (warned,) = (each for each in caplog.records if "unhandled" in each.getMessage())
    assert warned.levelno == logging.WARNING


@pytest.mark.parametrize("launcher", ["auto", "exec"])
def test_this_packages_loggers_stay_enabled(
    dask_client: Client, caplog: pytest.LogCaptureFixture, launcher: Launcher
) -> None:
    """`dictConfig` with its defaults silences other loggers, but none of this package."""

    def configure() -> None:
        import importlib
        import logging.config

        importlib.import_module("prefect_torch_ddp.rank.context")  # an executed rank loads it now
        names = ("prefect_torch_ddp.rank.context", "others")
        loggers = [logging.getLogger(name) for name in names]
        root = {"handlers": [], "level": "ERROR"}
        logging.config.dictConfig({"version": 1, "root": root})
        for logger in loggers:
            logger.warning("heard")

    with caplog.at_level(logging.INFO, "prefect_torch_ddp.ranks"):
        run_gang(dask_client, configure, world_size=1, launcher=launcher, process_group="none")
    assert [text for text in said_by_ranks(caplog) if "heard" in text] == ["[rank 0] heard"]
