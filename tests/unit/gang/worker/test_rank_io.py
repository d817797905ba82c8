"""What a rank prints becomes lines, however it is chunked."""

from hypothesis import given
from hypothesis import strategies as st

from prefect_torch_ddp.gang.worker.rank_io import MAX_LINE, LineCutter


@given(text=st.text(alphabet="ab é\n", max_size=60), cuts=st.lists(st.integers(1, 7)))
def test_chunks_do_not_matter(text: str, cuts: list[int]) -> None:
    """A multi-byte character or a line cut in the middle comes out whole."""
    data, cutter, lines = text.encode(), LineCutter(), []
    for cut in cuts:
        lines += cutter.feed(data[:cut])
        data = data[cut:]
    lines += cutter.feed(data, final=True)
    assert lines == [line for line in text.split("\n") if line.strip()]


def test_progress_bars_and_endless_lines() -> None:
    """A bar is one line, as it was at its end; output without line ends is passed on in pieces."""
    cutter = LineCutter()
    assert cutter.feed(b"\r10%\r20%") == []
    assert cutter.feed(b"\r30%\r") == []
    assert cutter.feed(b"\n40%\r\nlost\r100%") == ["30%", "40%"]
    assert [len(piece) for piece in cutter.feed(b"x" * 2 * MAX_LINE)] == [MAX_LINE, MAX_LINE]
    assert cutter.feed(b"\r  \rend\r", final=True) == ["end"]
    assert cutter.tail[0] == "30%"
