"""Owns the digest of a checkpoint's object: over those of its parts, so that several cores may verify one object.

BLAKE3 (https://github.com/BLAKE3-team/BLAKE3), since it takes a third of the time of sha256, even where a CPU has instructions
for that: the hashing is most of what verifying costs, and a part of each save.
"""

from collections.abc import Iterable

from blake3 import blake3

PART_BYTES = 2**23


def digest_of(data: bytes | memoryview) -> str:
    """Return the BLAKE3 over the BLAKE3 of each 8 MiB of `data` (each 32 bytes, in order), in hex."""
    digest = Digest()
    digest.update(memoryview(data))
    return digest.hexdigest()


def digest_of_parts(digests: Iterable[bytes]) -> str:
    """Return the same of parts whose digests are known."""
    return blake3(b"".join(digests)).hexdigest()


class Digest:
    """Takes content as it comes."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self._parts: list[bytes] = []
        self._part = blake3()
        self._room = PART_BYTES

    def update(self, data: memoryview) -> None:
        """Take what comes next."""
        while len(data):
            piece = data[: self._room]
            self._part.update(piece)
            self._room -= len(piece)
            if not self._room:
                self._parts.append(self._part.digest())
                self._part, self._room = blake3(), PART_BYTES
            data = data[len(piece) :]

    def hexdigest(self) -> str:
        """Return the digest of all that came."""
        return digest_of_parts([*self._parts, self._part.digest()] if self._room < PART_BYTES else self._parts)
