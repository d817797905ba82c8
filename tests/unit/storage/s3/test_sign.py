"""Signatures beside botocore's own: the same headers for any key, path, host, region and moment."""

from datetime import UTC, datetime
from urllib.parse import urlsplit

import pytest
from botocore import auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from hypothesis import given, settings
from hypothesis import strategies as st

from prefect_torch_ddp.storage.s3.get import GetSigner
from prefect_torch_ddp.storage.s3.read import quoted

HOSTS = (
    "http://127.0.0.1:9000",
    "https://bucket.s3.eu-west-1.amazonaws.com",
    "http://[::1]:80",
    "https://s3.example:443",
    "http://a.b:8080",
)
SECRETS = st.text("abcXYZ0189+/=", min_size=1, max_size=40)


def _by_botocore(url: str, region: str, credentials: Credentials, at_s: int) -> dict[str, str]:
    request = AWSRequest(method="GET", url=url)
    moment = datetime.fromtimestamp(at_s, UTC)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(auth, "get_current_datetime", lambda: moment)
        auth.S3SigV4Auth(credentials.get_frozen_credentials(), "s3", region).add_auth(request)
    return {name.lower(): value for name, value in request.headers.items()}


@settings(max_examples=200, deadline=None)
@given(
    host=st.sampled_from(HOSTS),
    key=st.text(min_size=1, max_size=30).filter(
        lambda text: text.isprintable() and not text.startswith("/")
    ),
    region=st.sampled_from(["us-east-1", "eu-central-1"]),
    secret=SECRETS,
    token=st.none() | SECRETS,
    at_s=st.integers(0, 4_000_000_000),
)
def test_the_same_as_botocore(
    *, host: str, key: str, region: str, secret: str, token: str | None, at_s: int
) -> None:
    """Of every header that botocore signs."""
    url = f"{host}/bucket/{quoted(key)}"
    credentials = Credentials("AKIDEXAMPLE", secret, token)
    made = GetSigner(host, region, credentials).headers(urlsplit(url).path, at_s)
    made = {name.lower(): value for name, value in made.items()}
    assert made.pop("host") == auth._host_from_url(url)
    assert made == _by_botocore(url, region, credentials, at_s)


def test_a_new_day_and_new_credentials_have_a_key_of_their_own() -> None:
    """Credentials that renew themselves are asked each time; the key that is kept is a day's."""
    credentials = Credentials("AKIDEXAMPLE", "one", None)
    signer = GetSigner(HOSTS[0], "us-east-1", credentials)
    for secret, at_s in (("one", 86_399), ("one", 86_400), ("two", 86_400), ("one", 86_399)):
        credentials.secret_key = secret
        expected = _by_botocore(f"{HOSTS[0]}/b/k", "us-east-1", credentials, at_s)
        assert signer.headers("/b/k", at_s)["Authorization"] == expected["authorization"]


def test_without_credentials_nothing_is_signed() -> None:
    """As for public data."""
    signer = GetSigner("https://data.example/b/", "us-east-1", None)
    assert signer.headers("/b/k") == {"host": "data.example"}
