"""How long a request waits before its next try."""

import pytest

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
