"""What is never put on record or shown: values that are named like secrets, credentials in URLs."""

import re

SECRET = re.compile(
    r"pass(word|wd|phrase)|secret|credential|(api|access|private|auth)[-_]?key"
    r"|(^|[-_.]|access|auth)token(?!s|iz)",
    re.IGNORECASE,
)
"""Finds such a name, dotted or not; a tokenizer and num_tokens are none."""
_USER = re.compile(r"(?<=://)[^/@\s]+@")
_QUERY = re.compile(
    r"([?&][^=&\s]*(?:token|key|secret|signature|credential|password)[^=&\s]*=)[^&\s]+",
    re.IGNORECASE,
)


def without_credentials(text: str) -> str:
    """Return a text without the users, passwords and keys of the URLs in it."""
    return _QUERY.sub(r"\1(hidden)", _USER.sub("", text))
