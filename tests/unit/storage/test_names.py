"""The one rule for the names of objects."""

import posixpath
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefect_torch_ddp.errors import BadKeyError
from prefect_torch_ddp.storage.names import MAX_KEY_BYTES, check_key, check_prefix, is_key

LONG_KEY = "/".join(["k" * 99] * 9) + "/"  # 900 bytes


REASONS = {
    "empty": ["", "a//b", "a/"],
    "absolute": ["/a"],
    "drive": ["C:/a", "c:a"],
    "backslash": ["a\\b"],
    "'.'": [".", "a/./b"],
    "'..'": ["..", "a/../b"],
    "control": ["a\0", "a\x1fb", "a\x7f", "a\x85"],
    "half a character": ["a\ud800"],
    "901 bytes": ["b" + LONG_KEY[:-1] + "b"],
    "255 bytes": ["ä" * 128, "a/" + "k" * 256],
    "unfinished": [".tmp/a"],
}


@pytest.mark.parametrize("reason", REASONS)
def test_bad_keys_are_refused_with_the_reason(reason):
    """Says what is wrong and how to write it."""
    for key in REASONS[reason]:
        with pytest.raises(BadKeyError, match=f"{reason}.*folder/name") as caught:
            check_key(key)
        assert len(str(caught.value)) < 400
        assert not is_key(key)


def test_good_keys_pass_unchanged():
    """What every storage can hold is a key."""
    usual = ["a", "a/b/c.json", "a-1=b_2", "k" * 255]
    good = [*usual, "...", "a/..b", ".hidden", "a/.tmp", "ä/Ω 😀", "ab:c"]
    for key in [*good, LONG_KEY[:-1] + "b"]:
        assert check_key(key) == key
        assert is_key(key)


@given(st.text(max_size=40) | st.text(alphabet="a1_.-=/:\\\n", max_size=12))
def test_an_accepted_key_stays_below_any_root(key):
    """Whatever the text: accepted means relative, in parts, and the same after normalising."""
    if is_key(key):
        assert posixpath.normpath(f"/root/{key}") == f"/root/{key}"
        assert len(key.encode()) <= MAX_KEY_BYTES


@pytest.mark.parametrize("prefix", ["", "a", "a/", "a/b", "a/.", ".", ".t"])
def test_prefixes_may_end_anywhere(prefix):
    """A prefix is the beginning of a key."""
    assert check_prefix(prefix) == prefix


@pytest.mark.parametrize("prefix", ["/", "../", "a//", "./", "C:", "a\\", "a\n", ".tmp/"])
def test_prefixes_that_no_key_can_have_are_refused(prefix):
    """A listing can't be led elsewhere; the error shows what was given."""
    with pytest.raises(BadKeyError, match=re.escape(f"no key can begin with {prefix!r}: ")):
        check_prefix(prefix)
