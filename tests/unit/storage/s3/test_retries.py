"""Which requests are tried again, and how long one waits before that."""

import pytest
from botocore.exceptions import ClientError
from botocore.loaders import Loader
from botocore.model import ServiceModel
from botocore.parsers import create_parser

from prefect_torch_ddp.storage.s3 import retries
from prefect_torch_ddp.storage.s3.storage import S3Storage


@pytest.mark.parametrize(("is_one_of_many", "longest_s"), [(False, 0.5), (True, 0.1)])
def test_a_small_read_of_a_batch_waits_less(
    monkeypatch: pytest.MonkeyPatch, *, is_one_of_many: bool, longest_s: float
) -> None:
    """A batch waits for its last object."""
    pauses: list[float] = []
    monkeypatch.setattr(retries.time, "sleep", pauses.append)
    monkeypatch.setattr(retries, "client_of", id)
    answers = iter([ConnectionError(), ConnectionError(), b"content"])

    def call(_client: object) -> bytes:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    location = S3Storage("bucket")
    assert retries.ask(location, "read", "key", call, is_one_of_many=is_one_of_many) == b"content"
    first, second = pauses
    assert longest_s / 2 <= first <= longest_s <= second <= 2 * longest_s


NO_SUCH_KEY = b"<Error><Code>NoSuchKey</Code><Message>gone</Message></Error>"


@pytest.mark.parametrize(
    ("operation", "body", "passes"),
    [
        ("GetObject", NO_SUCH_KEY, False),
        ("GetObject", NO_SUCH_KEY[:30], True),
        ("GetObject", NO_SUCH_KEY.replace(b"<Code>", b"<Cpde>"), True),
        ("GetObject", NO_SUCH_KEY.replace(b"Such", b"Suck"), True),
        ("GetObject", b"", True),
        ("HeadObject", b"", False),
    ],
)
def test_a_damaged_answer_is_not_taken_for_a_lasting_error(
    operation: str, body: bytes, *, passes: bool
) -> None:
    """As botocore reads it: without its body a 404 may be of an object that isn't there, or of a
    bucket."""
    model = ServiceModel(Loader().load_service_model("s3", "service-2"))
    shape = model.operation_model(operation).output_shape
    answer = {"status_code": 404, "headers": {}, "body": body}
    error = ClientError(create_parser("rest-xml").parse(answer, shape), operation)
    assert retries.may_pass(error) is passes
