"""`doctor`: checks a cluster and a storage before a training uses them."""

from pathlib import Path
from typing import Annotated

import typer


def doctor(
    cluster: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Address of a Dask scheduler; default: a local cluster."),
    ] = None,
    cluster_file: Annotated[
        Path | None,
        typer.Option(
            metavar="YAML", help="A file of ClusterParams: shows its job script, submits no job."
        ),
    ] = None,
    storage: Annotated[
        str | None,
        typer.Option(
            metavar="PLACE", help="A path, URI or Prefect block; default: ~/prefect-torch-ddp."
        ),
    ] = None,
    interface: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Network interface or network of the ranks."),
    ] = None,
    limit_s: Annotated[float, typer.Option(metavar="SECONDS", help="Limit of each wait.")] = 60.0,
) -> None:
    """Check a cluster and a storage.

    The exit code is 1 if a gang would fail there.
    """
    from prefect_torch_ddp.doctor.command import examine

    raise typer.Exit(examine(cluster, storage, interface, limit_s, cluster_file))
