"""What `--help` prints, kept as a text: one screen, each line whole."""

import pytest
from typer.testing import CliRunner

from prefect_torch_ddp import __version__
from prefect_torch_ddp.cli.app import app

SCREEN = 24
HELP = """\
Usage: prefect-torch-ddp [OPTIONS] COMMAND [ARGS]...

  Train with PyTorch DDP on Dask, as flows of Prefect.

Options:
  --version             Print the version.
  --install-completion  Install completion for the current shell.
  --show-completion     Show completion for the current shell, to copy it or
                        customize the installation.
  -h, --help            Show this message and exit.

Commands:
  train       Train and evaluate a workload.
  resume      Continue a run from its newest checkpoint.
  runs        List runs, the newest first.
  show        Show a run in ten lines, and where its report is.
  metrics     Print the metrics of a run.
  sync        Bring a tracker up to date with a run.
  doctor      Check a cluster and a storage.
  run-script  Run a script written for torchrun.
"""
COMMANDS = ["train", "resume", "runs", "show", "metrics", "sync", "doctor", "run-script"]


def printed(*given: str) -> str:
    """Return what a command prints in a terminal of 80 columns."""
    # Without rich there are no colours, and typer wraps at the width it is told.
    result = CliRunner().invoke(app, given, prog_name="prefect-torch-ddp", terminal_width=80)
    assert result.exit_code == 0, result.output
    return result.output


def test_the_commands_are_one_screen() -> None:
    """The text as it is; a new command has its line in it."""
    assert printed("--help") == printed("-h") == HELP
    assert HELP.count("\n") <= SCREEN


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_explains_its_options_on_a_screen(command: str) -> None:
    """Whatever it is called with is there."""
    text = printed(command, "--help")
    assert text.startswith(f"Usage: prefect-torch-ddp {command} ")
    assert text.count("\n") <= SCREEN + 6
    assert "..." not in text.partition("\n")[2]


def test_the_version_is_the_packages() -> None:
    """And nothing else is printed."""
    assert printed("--version") == f"{__version__}\n"
