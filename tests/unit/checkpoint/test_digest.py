"""Shows that an object's digest is the same whether its content comes at once, in pieces, or in
parts that others hash."""

from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from prefect_torch_ddp.checkpoint.objects import PART_BYTES, Digest, digest_of, digest_of_parts

BYTES = bytes(range(251)) * (3 * PART_BYTES // 251)


@settings(deadline=None)
@given(
    st.sampled_from([0, 1, PART_BYTES - 1, PART_BYTES, PART_BYTES + 1, 2 * PART_BYTES, len(BYTES)]),
    st.data(),
)
def test_the_digest_is_of_the_content_and_not_of_how_it_comes(
    num_bytes: int, data: st.DataObject
) -> None:
    """At once, piece by piece, by parts."""
    content = memoryview(BYTES)[:num_bytes]
    cuts = sorted(data.draw(st.lists(st.integers(0, num_bytes), max_size=5)))
    digest = Digest()
    for start, end in zip([0, *cuts], [*cuts, num_bytes], strict=True):
        digest.update(content[start:end])
    parts = [content[start : start + PART_BYTES] for start in range(0, num_bytes, PART_BYTES)]
    assert (
        digest.hexdigest()
        == digest_of(content)
        == digest_of_parts(blake3(part).digest() for part in parts)
    )


def test_it_is_another_one_for_other_content() -> None:
    """Swapped parts, one part less, and a part's digest in place of the part among them."""
    one, two = BYTES[:PART_BYTES], BYTES[PART_BYTES : 2 * PART_BYTES]
    contents = [b"", b"\0", one, two, one + two, two + one, one + two + b"\0", blake3(one).digest()]
    assert len({digest_of(content) for content in contents}) == len(contents)
