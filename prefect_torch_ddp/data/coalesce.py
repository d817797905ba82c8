"""Owns which samples of a shard are read by one request: neighbours, when a batch asks for them, as an evaluation does. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from prefect_torch_ddp.data.shard_index import PackedSample

LARGEST_GAP_BYTES = 8 * 1024
"""Read and thrown away between two samples: a label, headers and filling are 2 kB, and a request costs as much CPU as 200 kB."""
LARGEST_SPAN_BYTES = 2**20
"""So that a batch is still read over several connections."""


@dataclass
class Span:
    """A range of a shard that holds some of the samples."""

    shard: int
    start: int
    end: int
    members: list[int] = field(default_factory=list)
    """Their places in what was asked for."""

    @property
    def num_bytes(self) -> int:
        """Its length."""
        return self.end - self.start

    def reaches(self, sample: PackedSample) -> bool:
        """Tell whether a sample behind it is near enough to be read along."""
        is_near = sample.shard == self.shard and sample.start - self.end <= LARGEST_GAP_BYTES
        return is_near and sample.start + sample.num_bytes - self.start <= LARGEST_SPAN_BYTES


def spans_of(samples: Sequence[PackedSample]) -> list[Span]:
    """Return ranges that hold all samples, each sample in one, neighbours together."""
    spans: list[Span] = []
    for place in sorted(range(len(samples)), key=lambda place: (samples[place].shard, samples[place].start)):
        sample = samples[place]
        end = sample.start + sample.num_bytes
        if not spans or not spans[-1].reaches(sample):
            spans.append(Span(sample.shard, sample.start, end))
        span = spans[-1]
        span.end = max(span.end, end)  # the same sample may be asked for twice
        span.members.append(place)
    return spans
