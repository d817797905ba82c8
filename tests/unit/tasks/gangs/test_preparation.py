"""What the page of a preparation says of an error."""

from prefect_torch_ddp.tasks.gangs.preparation import stopped_line


def test_credentials_within_an_error_are_hidden() -> None:
    """An address with a password may be in what Dask raises."""
    error = ValueError("can't read https://me:SECRET@host/x")
    said = stopped_line("prepared 1 of 2 partitions", error)
    assert (
        said
        == "prepared 1 of 2 partitions; stopped by ValueError: can't read https://(hidden)@host/x"
    )
