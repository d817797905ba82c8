"""What is never put on record or shown: values named like secrets, and credentials within texts.

A name is read word by word (`hfToken` is `hf token`), so that `pad_token` and `token_dim` stay
visible. When the words don't decide, the value is hidden.
"""

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

HIDDEN = "(hidden)"


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_STRONG = _words(
    """password passwords passwd passphrase passcode pwd secret secrets credential credentials
    authorization bearer cookie cookies dsn apikey apitoken accesskey authkey privatekey
    secretkey authtoken accesstoken sas"""
)
"""Words whose values are secrets, whatever stands before them; also as numbers."""
_PAIRS = frozenset(
    f"{first} {second}"
    for second in ("key", "keys", "token", "tokens")
    for first in ("api", "access", "private", "auth", "secret")
) | {"connection string"}
"""Two words that make the whole name a secret's, wherever they stand in it."""
_LAST = _words("token tokens key keys auth pat pass")
"""Last words of a secret's name, unless the word before them is an ordinary one."""
_ORDINARY = {
    "token": _words(
        """pad padding eos bos sos cls sep mask masked unk unknown num n per max min start end stop
        special next prev previous first last image audio text input output target prefix suffix
        bad forced decoder encoder vocab new"""
    ),
    "key": _words(
        """sort primary foreign group image label target cache run dict map lookup index feature
        input output data batch partition join public text loss metric query value attn attention
        num n sample time order column row field class name url s3 object path file"""
    ),
    "auth": _words("no use with"),
    "pass": _words("forward backward one first second single two multi num n per low high band"),
}
_SIGNATURE = re.compile(r"(?:^|[-_.])(?:sig|signature|code)$", re.IGNORECASE)
"""Further names of secrets in a URL's query."""
_MIN_RANDOM = 20
"""Characters from which a mixture of letters and digits under the name `key` is hidden."""

_USER = re.compile(
    r"(?<=://)(?:[^\s/@:?#\[]*:(?!\d{1,5}(?:/|$))[^\s?#]*|[^\s/@?#]+)@"  # user:pa/ss@, key@
    r"|(?<![\w:/])[A-Za-z][\w.+-]*:[^\s/@:]+@(?=[\w.-]+)"  # user:password@host
    r"|(?<![\w:])(?<=//)[^\s/@?#]+@"
)
_SCHEME = re.compile(
    r"\b(bearer(?= (?!tokens?\b)\S{4})|(?:basic|digest)(?= [^\s\"',;]*[\d=]))\s+[^\s\"',;]+",
    re.IGNORECASE,
)
"""The value of an HTTP header `Authorization`."""
_KNOWN = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{8,}|gh[pousr]_\w{10,}|github_pat_\w+|glpat-[\w-]{10,}|xox[abprs]-[\w-]+"
    r"|sk-[\w-]{16,}|(?:AKIA|ASIA)[A-Z0-9]{12,}|AIza[\w-]{30,}|eyJ[\w-]{8,}\.[\w-]+(?:\.[\w-]*)?)"
)
"""Keys that their issuers made to be recognised."""
_NAMED = re.compile(
    r"(?P<head>(?P<name>[A-Za-z_][\w.-]*)[\"']?\s*[=:]\s*)"
    r"(?P<value>\"[^\"]*\"|'[^']*'|(?!//)(?:(?:[Bb]earer|[Bb]asic|[Dd]igest) )?[^\s;,&\"'(]+)"
)
"""`NAME=value`, `name: value` and `"name": "value"`."""
_OPTION = re.compile(r"(?P<head>(?<!\S)--?(?P<name>[A-Za-z][\w-]*)\s+)(?P<value>[^\s-]\S*)")
_PRIVATE = re.compile(r"-----BEGIN[A-Z ]* PRIVATE KEY-----.*?(?:-----END[^-]*-----|$)", re.DOTALL)


def is_secret(name: str, value: Any = "") -> bool:
    """Tell by a name, dotted or not, and the kind of its value whether that is a secret."""
    words = [word.lower() for word in _WORD.findall(name)]
    if value is None or isinstance(value, bool) or not words:
        return False
    if isinstance(value, int | float):  # max_tokens, secret_santa_rows
        return words[-1] in _STRONG
    pairs = {f"{first} {second}" for first, second in pairwise(words)}
    if _STRONG.intersection(words) or _PAIRS & pairs:
        return True
    last = words[-1]
    if len(words) == 1 and last in {"key", "keys", "pass"}:
        return _is_random(value)
    ordinary = _ORDINARY.get(last if last == "pass" else last.removesuffix("s"), frozenset())
    return last in _LAST and not ordinary.intersection(words[-2:-1])


def without_credentials(text: str) -> str:
    """Return a text without the users, passwords and keys that are recognised in it."""
    text = _PRIVATE.sub(HIDDEN, text)
    text = _USER.sub("", text)
    text = _OPTION.sub(_without_value, _NAMED.sub(_without_value, text))
    return _KNOWN.sub(HIDDEN, _SCHEME.sub(rf"\1 {HIDDEN}", text))


def hidden(name: str, value: Any) -> Any:
    """Return a named value without the secrets in it, at any depth; tuples become lists."""
    if isinstance(value, Mapping):
        named = value.get("name")  # {"name": "API_KEY", "value": "..."}, as Kubernetes has it
        if isinstance(named, str) and "value" in value and is_secret(named, value["value"]):
            value = {**value, "value": HIDDEN}
        is_all = is_secret(name) and _STRONG.intersection(map(str.lower, _WORD.findall(name)))
        return HIDDEN if is_all else {key: hidden(str(key), item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [hidden(_flag(value, at) or name, item) for at, item in enumerate(value)]
    if is_secret(name, value):
        return HIDDEN
    return without_credentials(value) if isinstance(value, str) else value


def _flag(values: Sequence[Any], at: int) -> str:
    """Return the option that an argument follows: `["--password", "x"]`."""
    before = values[at - 1] if at else ""
    is_flag = isinstance(before, str) and before.startswith("-") and "=" not in before
    return before.lstrip("-") if is_flag else ""


def _without_value(found: re.Match[str]) -> str:
    name, value = found["name"], found["value"]
    in_query = found.start() > 0 and found.string[found.start() - 1] in "?&"
    is_named = is_secret(name, int(value) if value.isdecimal() else value)
    if value == HIDDEN or not (is_named or (in_query and _SIGNATURE.search(name))):
        return found[0]
    quote = value[0] if value[:1] in {'"', "'"} else ""
    return f"{found['head']}{quote}{HIDDEN}{quote}"


def _is_random(value: Any) -> bool:
    text = value if isinstance(value, str) else ""
    kinds = (str.isdigit, str.isalpha)
    return len(text) >= _MIN_RANDOM and " " not in text and all(any(map(k, text)) for k in kinds)
