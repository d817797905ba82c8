"""What the command prints if it is cancelled."""

from pathlib import Path

import pytest
from prefect.exceptions import CancelledRun

from prefect_torch_ddp.cli.app import main
from prefect_torch_ddp.records import run_record


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (KeyboardInterrupt(), "cancelled by Ctrl-C (SIGINT)"),
        (CancelledRun("cancelled in Prefect"), "cancelled in Prefect"),
    ],
)
def test_a_cancelled_command_says_so_in_a_line(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    says: str,
) -> None:
    """After a Ctrl-C that came outside of a flow's own code, it ended without a word."""

    def leave(*_: object) -> None:
        raise error

    monkeypatch.setattr(run_record, "list_run_records", leave)
    with pytest.raises(SystemExit) as ended:
        main(["runs", "--storage", str(tmp_path)])
    assert ended.value.code == 130
    assert capsys.readouterr() == ("", f"prefect-torch-ddp: {says}\n")
