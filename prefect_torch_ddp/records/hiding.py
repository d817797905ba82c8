"""What is never put on record or shown: values that are named like secrets, credentials in URLs."""

import re
from collections.abc import Mapping
from typing import Any

SECRET = re.compile(
    r"pass(word|wd|phrase)|secret|credential|(api|access|private|auth)[-_]?key"
    r"|(^|[-_.]|access|auth)token(?!s|iz)",
    re.IGNORECASE,
)
"""Finds such a name, dotted or not; a tokenizer and num_tokens are none."""
HIDDEN = "(hidden)"
_USER = re.compile(r"(?<=://)[^/@\s]+@")
_QUERY = re.compile(
    r"([?&][^=&\s]*(?:token|key|secret|signature|credential|password)[^=&\s]*=)[^&\s]+",
    re.IGNORECASE,
)


def without_credentials(text: str) -> str:
    """Return a text without the users, passwords and keys of the URLs in it."""
    return _QUERY.sub(r"\1(hidden)", _USER.sub("", text))


def hidden(name: str, value: Any) -> Any:
    """Return a named value without the secrets in it, at any depth; tuples become lists."""
    if SECRET.search(name) and value is not None:
        return HIDDEN
    if isinstance(value, Mapping):
        return {key: hidden(str(key), item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [hidden(name, item) for item in value]
    return without_credentials(value) if isinstance(value, str) else value
