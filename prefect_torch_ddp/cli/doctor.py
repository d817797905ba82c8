"""`doctor`: looks at a cluster and a storage before a training does."""

from pathlib import Path
from typing import Annotated

import typer


def doctor(
    cluster: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Address of a Dask scheduler; otherwise a local cluster."),
    ] = None,
    cluster_file: Annotated[
        Path | None,
        typer.Option(
            metavar="YAML", help="A file of ClusterParams: shows its job script, submits nothing."
        ),
    ] = None,
    storage: Annotated[
        str | None, typer.Option(metavar="PLACE", help="A path, URI or Prefect block.")
    ] = None,
    interface: Annotated[
        str | None, typer.Option(metavar="NAME", help="Interface or network that ranks are to use.")
    ] = None,
    limit_s: Annotated[float, typer.Option(metavar="SECONDS", help="Limit of each wait.")] = 60.0,
) -> None:
    """Look at a cluster and a storage.

    It exits with 1 if a gang would fail there.
    """
    from prefect_torch_ddp.doctor.command import examine

    raise typer.Exit(examine(cluster, storage, interface, limit_s, cluster_file))
