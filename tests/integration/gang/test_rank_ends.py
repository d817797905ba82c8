"""A rank ends as Python does: handlers run, threads are joined, files are written."""

from itertools import product
from pathlib import Path
from typing import get_args

import pytest
from distributed import Client

from prefect_torch_ddp import RankFailedError, run_gang
from prefect_torch_ddp.protocol.rank import Launcher
from tests.workloads import open_files

KINDS, ENDS = ("function", "by-value", "script"), ("returns", "raises", "leaves")


def in_ci(launcher: Launcher, kind: str, end: str) -> bool:
    """Tell whether CI runs this case: of the ranks that load torch anew, each kind and each end
    once."""
    return launcher == "auto" or KINDS.index(kind) == ENDS.index(end)


CASES = [
    pytest.param(*case, marks=() if in_ci(*case) else pytest.mark.more, id="-".join(case))
    for case in product(get_args(Launcher), KINDS, ENDS)
]


@pytest.mark.parametrize(("launcher", "kind", "end"), CASES)
def test_what_user_code_holds_open_is_written(
    dask_client: Client, tmp_path: Path, launcher: Launcher, kind: str, end: str
) -> None:
    """Files, archives, buffers of objects, exit handlers and threads lose nothing at the end."""
    path = Path(open_files.__file__)
    script = "import runpy\ndef main(*args): runpy.run_path({!r})['keep_open'](*args)"
    space: dict[str, object] = {}
    exec(script.format(str(path)), space)
    fn = {"function": open_files.keep_open, "by-value": space["main"], "script": str(path)}[kind]
    call = {"args": (str(tmp_path), end), "world_size": 1, "launcher": launcher}
    mode = {"process_group": "none"}
    if end == "returns":
        run_gang(dask_client, fn, **call, **mode)  # type: ignore[arg-type]
    else:
        words = "ValueError: boom" if end == "raises" else r"left by sys.exit\(3\)"
        with pytest.raises(RankFailedError, match=words):
            run_gang(dask_client, fn, **call, **mode)  # type: ignore[arg-type]
    expected = dict.fromkeys(open_files.KINDS, open_files.NUM_LINES)
    assert open_files.lines_of(tmp_path) == expected
