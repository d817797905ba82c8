"""Lean GETs go to the URL that botocore used for an object."""

import pytest

from prefect_torch_ddp.storage.s3.read import Target, target_of

USUAL = {"signing_name": "s3", "auth_type": "v4", "region": "eu-west-1"}
URL = "https://b.s3.eu-west-1.amazonaws.com/a/%C3%A4%20b%2B.png?x-id=GetObject"
NAME = "a/ä b+.png"


@pytest.fixture(autouse=True)
def _without_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)


def test_the_bucket_is_what_comes_before_the_name() -> None:
    """Whatever the addressing style, and whichever region botocore was sent to."""
    found = target_of(NAME, URL, USUAL, is_signed=True)
    assert found == Target("https://b.s3.eu-west-1.amazonaws.com/", "eu-west-1")
    by_path = target_of("k", "http://127.0.0.1:9000/b/k", USUAL, is_signed=True)
    assert by_path == Target("http://127.0.0.1:9000/b/", "eu-west-1")
    public = target_of("k", "http://127.0.0.1:9000/b/k", {}, is_signed=False)
    assert public == Target("http://127.0.0.1:9000/b/", "")


@pytest.mark.parametrize(
    "signing",
    [
        {},
        USUAL | {"signing_name": "s3express"},
        USUAL | {"auth_type": "v4a"},
        USUAL | {"region": None},
    ],
)
def test_what_is_signed_in_another_way_is_botocores(signing: dict[str, str]) -> None:
    """Directory buckets, access points over regions; and a URL that we would write otherwise."""
    assert target_of(NAME, URL, signing, is_signed=True) is None
    assert target_of("a/b", URL, USUAL, is_signed=True) is None


def test_proxies_are_botocores(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for hosts that need none."""
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:3128")
    assert target_of(NAME, URL, USUAL, is_signed=True) is None
    monkeypatch.setenv("NO_PROXY", "amazonaws.com")
    assert target_of(NAME, URL, USUAL, is_signed=True) is not None
