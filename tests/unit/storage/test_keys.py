"""The one rule for the names of objects."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefect_torch_ddp.errors import BadKeyError
from prefect_torch_ddp.storage.keys import MAX_KEY_BYTES, check_key, check_prefix, is_key

LONG_KEY = "/".join(["k" * 99] * 9) + "/"  # 900 bytes


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        ("", "empty"),
        ("/a", "absolute"),
        ("C:/a", "drive"),
        ("c:a", "drive"),
        ("a\\b", "backslash"),
        ("a//b", "empty"),
        ("a/", "empty"),
        (".", "'.'"),
        ("a/./b", "'.'"),
        ("..", "'..'"),
        ("a/../b", "'..'"),
        ("a\0", "control"),
        ("a\x1fb", "control"),
        ("a\x7f", "control"),
        ("a\x85", "control"),
        ("a\ud800", "half a character"),
        ("b" + LONG_KEY[:-1] + "b", "901 bytes"),
        ("ä" * 128, "255 bytes"),
        (".tmp/a", "unfinished"),
    ],
)
def test_bad_keys_are_refused_with_the_reason(key, reason):
    """Says what is wrong and how to write it."""
    with pytest.raises(BadKeyError, match=reason) as caught:
        check_key(key)
    assert "folder/name" in str(caught.value)
    assert len(str(caught.value)) < 400
    assert not is_key(key)


@pytest.mark.parametrize(
    "key",
    [
        "a",
        "a/b/c.json",
        "...",
        "a/..b",
        ".hidden",
        "a/.tmp",
        "ä/Ω 😀",
        "ab:c",
        "k" * 255,
        LONG_KEY[:-1] + "b",
    ],
)
def test_good_keys_pass_unchanged(key):
    """What every storage can hold is a key."""
    assert check_key(key) == key
    assert is_key(key)


@given(st.text(max_size=40))
def test_an_accepted_key_stays_below_any_root(key):
    """Whatever the text: accepted means relative, in parts, and the same after normalising."""
    if is_key(key):
        import posixpath

        assert posixpath.normpath(key) == key
        assert posixpath.normpath(f"/root/{key}").startswith("/root/")
        assert len(key.encode()) <= MAX_KEY_BYTES
    else:
        with pytest.raises(BadKeyError):
            check_key(key)


@pytest.mark.parametrize("prefix", ["", "a", "a/", "a/b", "a/.", ".", ".t"])
def test_prefixes_may_end_anywhere(prefix):
    """A prefix is the beginning of a key."""
    assert check_prefix(prefix) == prefix


@pytest.mark.parametrize("prefix", ["/", "../", "a//", "./", "C:", "a\\", "a\n", ".tmp/"])
def test_prefixes_that_no_key_can_have_are_refused(prefix):
    """A listing can't be led elsewhere."""
    with pytest.raises(BadKeyError):
        check_prefix(prefix)
