"""Which addresses name a file that a run may read."""

import pytest

from prefect_torch_ddp import InvalidParamsError
from prefect_torch_ddp.storage.locate import source_from_uri

DIGEST = "0" * 64


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("https://host/a.csv?token=SECRET", "has a password or a query"),
        ("https://me:SECRET@host/a.csv", "has a password or a query"),
        ("https://host/folder/", "names no single file"),
        ("https:///a.csv", "names no single file"),
        ("https://host/a.csv#sha256=12", "64 hexadecimal digits"),
        ("https://host/a.csv#page", "64 hexadecimal digits"),
        ("https://host/%2e%2e", "can't be used"),
        ("https://host/a%2Fb.csv", "a slash, as %2F"),
        ("https://host/\N{LATIN SMALL LETTER E WITH ACUTE}.csv", "write it as %"),
        ("https://host/a b.csv", "write it as %"),
        ("https://[::1/a.csv", "can't be read: Invalid IPv6"),
        (
            "https://host:SECRET/a.csv",
            r"https://host/a.csv has a port that is no number up to 65535",
        ),
        ("https://host:70000/a.csv", "has a port that is no number up to 65535"),
        ("http://host/a.csv", "by http:, .* give the https:// address"),
        ("ftp://host/a.csv", "by ftp:, .* give the https:// address"),
    ],
)
def test_other_addresses_are_refused_without_their_secrets(address: str, says: str) -> None:
    """The message says what is wrong and what to write."""
    with pytest.raises(InvalidParamsError, match=says) as refused:
        source_from_uri(address)
    assert "SECRET" not in str(refused.value)


def test_a_file_is_named_by_its_address() -> None:
    """The digest isn't part of its address, and a name may be quoted."""
    found = source_from_uri(f"HTTPS://host/a/b%20c.csv#sha256={DIGEST}")
    assert found.uri.endswith("://host/a/b%20c.csv")
    assert found == source_from_uri(f"https://host/a/b%20c.csv#sha256={DIGEST}")
