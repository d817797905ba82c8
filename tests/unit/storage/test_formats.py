"""What a stored file says of its format: it is read, it is damaged, or it is refused by name."""

import json
from typing import Any

import pytest

from prefect_torch_ddp.errors import NewerFormatError
from prefect_torch_ddp.storage.formats import DAMAGE, Format

KIND = Format("list of things", number=2)

READ = {"the newest": 2, "an older one": 1}
DAMAGED = {
    "no object": "[1]",
    "null": "null",
    "a text": '"format"',
    "no format": '{"things": []}',
    "cut off": '{"format": 2, "thin',
    "empty": "",
}
REFUSED: dict[str, tuple[Any, str]] = {
    "the next one": (3, "of format 3; prefect-torch-ddp .* Install a newer version"),
    "a huge one": (10**30, f"of format {10**30}; .* Install a newer version"),
    "a number as text": ("2", 'whose format is "2"'),
    "a text": ("zarr", 'whose format is "zarr"'),
    "true": (True, "whose format is true"),
    "null": (None, "whose format is null"),
    "zero": (0, "whose format is 0"),
    "negative": (-1, "whose format is -1"),
    "a fraction": (1.5, "whose format is 1.5"),
    "a whole number as a fraction": (2.0, "whose format is 2.0"),
    "a list": ([2], r"whose format is \[2\]"),
    "an object": ({"number": 2}, r'whose format is {"number": 2}'),
}


@pytest.mark.parametrize("number", READ.values(), ids=READ)
def test_its_own_formats_are_read(number: int) -> None:
    """This version's, and all before it."""
    data = json.dumps({"format": number, "version": "0.1.0", "things": [1]}).encode()
    assert KIND.from_bytes(data, "here/things.json") == {"things": [1]}


@pytest.mark.parametrize("text", DAMAGED.values(), ids=DAMAGED)
def test_what_does_not_say_its_format_is_damaged(text: str) -> None:
    """The reader decides what a damaged file means."""
    with pytest.raises(DAMAGE):
        KIND.from_bytes(text.encode(), "here/things.json")


@pytest.mark.parametrize(("number", "says"), REFUSED.values(), ids=REFUSED)
def test_a_format_that_is_not_known_is_refused(number: object, says: str) -> None:
    """The error names the file and the value; whether it is damaged isn't guessed."""
    data = json.dumps({"format": number, "things": [1]}).encode()
    with pytest.raises(NewerFormatError, match=f"here/things.json is a list of things {says}"):
        KIND.from_bytes(data, "here/things.json")


def test_the_error_names_only_a_version_that_is_a_text() -> None:
    """Of a file that holds something else, what to install isn't known."""
    with pytest.raises(NewerFormatError, match=r"of format 3; .* Install a newer version"):
        KIND.check({"format": 3, "version": 9}, "here")
