"""The command's entry: all commands, and what is printed if one fails."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand

from prefect_torch_ddp.cli.doctor import doctor
from prefect_torch_ddp.cli.failures import EXIT_CANCELLED, EXIT_REFUSED, cancel_in_words
from prefect_torch_ddp.cli.options import refuse_unnamed
from prefect_torch_ddp.cli.run_script import OfScripts, run_script
from prefect_torch_ddp.cli.runs import metrics, runs, show
from prefect_torch_ddp.cli.sync import sync
from prefect_torch_ddp.cli.train import resume, train
from prefect_torch_ddp.errors import PrefectTorchDdpError

NAME = "prefect-torch-ddp"

app = typer.Typer(
    name=NAME,
    help="Train with PyTorch DDP on Dask, as flows of Prefect.",
    no_args_is_help=True,
    rich_markup_mode=None,  # rich takes as long to load as all the rest
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
EXTRA = {"allow_extra_args": True, "ignore_unknown_options": True}
"""Taken by a command that refuses them in its own words."""


class _NamesAll(TyperCommand):
    def invoke(self, ctx: Any) -> Any:
        # An unknown option may have been taken for the command's argument.
        argument = next(each.name for each in self.params if each.param_type_name == "argument")
        flags = [flag for each in self.params for flag in each.opts]
        refuse_unnamed([ctx.params[argument], *ctx.args], str(ctx.info_name), flags)
        return super().invoke(ctx)


for training in (train, resume):
    app.command(cls=_NamesAll, context_settings=EXTRA)(training)
for command in (runs, show, metrics, sync, doctor):
    app.command()(command)
app.command("run-script", cls=OfScripts)(run_script)


def _print_version(given: bool) -> None:  # noqa: FBT001 - typer's way
    if given:
        from prefect_torch_ddp.lazy import __version__

        print(__version__)
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Train with PyTorch DDP on Dask, as flows of Prefect."""


def main(given: Sequence[str] | None = None) -> NoReturn:
    """Run the command and exit; the exit code is 2 if an argument is refused or a run fails."""
    # A console script has its own folder there; workloads are imported from the current folder.
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        app(given, prog_name=NAME)
    except PrefectTorchDdpError as error:
        print(f"{NAME}: {error}", *getattr(error, "__notes__", ()), sep="\n", file=sys.stderr)
        sys.exit(EXIT_REFUSED)
    except BaseException as error:
        if not (how := cancel_in_words(error)):
            raise
        print(f"{NAME}: {how}", file=sys.stderr)
        sys.exit(EXIT_CANCELLED)
    sys.exit(0)
