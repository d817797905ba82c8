"""What is never put on record or shown: values named like secrets, and credentials within texts.

A name is read word by word (`hfToken` is `hf token`), so that `pad_token` and `token_dim` stay
visible. When the words don't decide, the value is hidden. What is hidden leaves `(hidden)` in its
place, so that no reader takes the rest for the whole value.
"""

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

HIDDEN = "(hidden)"


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_STRONG = _words(
    """passcode pwd dbpwd userpwd dbpass userpass authorization bearer cookie cookies dsn sas
    authkeys"""
)
"""Words whose values are secrets, whatever stands before them."""
_STRONG_PART = re.compile(
    r"passw(?:or)?d|passphrase|secret(?!ar|e|ion)|credential"
    r"|(?:api|access|private|auth)key|(?:api|access|auth)token"
)
"""The same within a word, as in `PGPASSWORD`, `clientsecret` and `wandbapikey`."""
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
_IN_QUERY = re.compile(r"(?:^|[-_.])(?:sig|code)$|(?:signature|token|key)$", re.IGNORECASE)
"""Further names of secrets in a URL's query."""
_MIN_DIGITS = 4
"""Digits from which a number is hidden whose name has a secret's words before its last one."""
_MIN_RANDOM = 20
"""Characters from which a mixture of letters and digits under the name `key` is hidden."""

_REFERENCES = {
    "secretKeyRef": _words("name key optional"),
    "secretRef": _words("name namespace optional"),
    "imagePullSecrets": _words("name"),
    "secret": _words("secretName items defaultMode optional"),
}
"""Kubernetes' names of where a secret is, which aren't what it is; each with its fields."""
_OBJECT_NAME = re.compile(r"[a-z0-9](?:[a-z0-9.-]{0,251}[a-z0-9])?")

_HOST = r"(?:[\w.-]++|\[[\w:.%]++\])(?::\d{1,5})?+"
_URL_USER = re.compile(
    r"(?<![\w+.-])(?P<scheme>[\w+.-]*+)://"
    rf"(?P<user>[^\s/@:?#\[\"']*:(?!\d{{1,5}}(?:,{_HOST})*+(?:[/\"']|[?#][\w.-]*=|$))"
    r"(?=[^\s@]{0,1000}+@)"  # only for speed
    # Up to the last `@`, though that may belong to the query: in `u:p@x/y?name=s@host` all before
    # `host` may be the password, and a shown secret is worse than a lost host.
    r"\S{0,1000}|[^\s/@?#\"']+)@(?!sha\d+:)"
)
"""`scheme://user:p@a/s?s#s@`, `scheme://key@`; a digest follows `@` in `docker://repo:tag@sha256:`.
In a port's place is no password, with more hosts after it or none."""
_USER_IS_NO_SECRET = _words("ssh git+ssh sftp hdfs abfs abfss wasb wasbs")
"""Schemes whose URLs have a user or a container before `@`, which is no secret by itself."""
_USER = re.compile(
    r"(?<![\w:/.+-])(?!mailto:)[A-Za-z][\w.+-]*+:[^\s/@:]+@"  # user:password@host.org, host:80
    r"(?=(?:[\w-]+\.)+[A-Za-z]{2,}\b|\d+(?:\.\d+){3}\b|localhost\b|[\w.-]+:\d{1,5}\b)(?!sha\d+:)"
    r"|(?<=(?<![\w:/])//)[^\s/@?#]+@"
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
_HEAD = re.compile(
    r"(?<![\w.-])(?P<name>[\w.-]++)(?:\\*[\"']?\s*[=:]+>?\s*|(?P<gap>\s+|[\"'],\s*(?=[\"'])))"
)
"""`NAME=`, `name: `, `"name": `; with `gap` an option's name, if it is one."""
_QUOTED = re.compile(
    r"[bBrRuU]?(?:\"(?:[^\"\\]|\\.)*(?:\"|$)|'(?:[^'\\]|\\.)*(?:'|$))[^\s,;&)}\]\"'\\]*"
    r"|(?P<quote>\\+[\"'])(?:.*?(?<!\\)(?P=quote)|.*)"
    r"|(?:\{[^}]*(?:\}|$)|\[[^\]]*(?:\]|$)|\([^)]*(?:\)|$))[^\s,;&)}\]\"'\\]*",
    re.DOTALL,
)
"""A value in quotes or brackets, which a cut may have left open; escaped quotes may be in it, or
around it."""
_BARE = re.compile(r"(?:(?:bearer|basic|digest|token|apikey) +)?\S+", re.IGNORECASE)
_HEADER = re.compile(r"(?:[A-Za-z][\w-]* +)?\S+(?:(?<=,)\s+\S+)*")
"""Of `Authorization`: a scheme, and one value or several, after commas."""
_OF_QUERY = re.compile(r"[^\s&#]+")
_NUMBER = re.compile(r"\d+")
_CLOSING = "\"')]},"
_IS_HIDDEN = re.compile(r"\(hidden\)(?=[\s\"')\]},;&]|$)")
_PRIVATE = re.compile(r"-----BEGIN[A-Z ]* PRIVATE KEY-----.*?(?:-----END[^-]*-----|$)", re.DOTALL)


def is_secret(name: str, value: Any = "") -> bool:
    """Tell by a name, dotted or not, and the kind of its value whether that is a secret."""
    words = _words_of(name)
    if value is None or isinstance(value, bool) or not words:
        return False
    if isinstance(value, int | float):
        return _is_secret_number(words, is_long=abs(value) >= 10 ** (_MIN_DIGITS - 1))
    return _has_strong(words) or _is_last(words, value)


def without_credentials(text: str) -> str:
    """Return a text with `(hidden)` for the users, passwords and keys that are recognised in it."""
    text = _without_named(_PRIVATE.sub(HIDDEN, text))
    text = _USER.sub(f"{HIDDEN}@", _URL_USER.sub(_without_user, text))
    return _KNOWN.sub(HIDDEN, _SCHEME.sub(rf"\1 {HIDDEN}", text))


def hidden(name: str, value: Any) -> Any:
    """Return a named value without the secrets in it, at any depth; tuples become lists."""
    if isinstance(value, Mapping):
        named = value.get("name")  # {"name": "API_KEY", "value": "..."}, as Kubernetes has it
        if isinstance(named, str) and "value" in value and is_secret(named, value["value"]):
            value = {**value, "value": HIDDEN}
        if _has_strong(_words_of(name)) and not _is_reference(name, value):
            return HIDDEN
        return {key: hidden(str(key), item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [hidden(_flag(value, at) or name, item) for at, item in enumerate(value)]
    if is_secret(name, value) and not (name == "secretName" and _is_object(value)):
        return HIDDEN
    return without_credentials(value) if isinstance(value, str) else value


def _is_reference(name: str, value: Mapping[Any, Any]) -> bool:
    """Tell whether a value has just the fields with which Kubernetes refers to a secret."""
    fields = _REFERENCES.get(name, frozenset())
    named = value.get("secretName" if name == "secret" else "name")
    return fields.issuperset(value) and _is_object(named)


def _is_object(value: Any) -> bool:
    """Tell whether a value is the name of an object in Kubernetes, and doesn't look like a key."""
    is_name = isinstance(value, str) and _OBJECT_NAME.fullmatch(value) is not None
    return is_name and not _is_random(value)


def _flag(values: Sequence[Any], at: int) -> str:
    """Return the option that an argument follows: `["--password", "x"]`."""
    before = values[at - 1] if at else ""
    is_flag = isinstance(before, str) and before.startswith("-") and "=" not in before
    return before.lstrip("-") if is_flag else ""


def _words_of(name: str) -> list[str]:
    return [word.lower() for word in _WORD.findall(name)]


def _is_strong(word: str) -> bool:
    return word in _STRONG or _STRONG_PART.search(word) is not None


def _has_strong(words: Sequence[str]) -> bool:
    pairs = {f"{first} {second}" for first, second in pairwise(words)}
    return any(map(_is_strong, words)) or bool(_PAIRS & pairs)


def _is_last(words: Sequence[str], value: Any) -> bool:
    last = words[-1]
    if len(words) == 1 and last in {"key", "keys", "pass"}:
        return _is_random(value)
    return last in _LAST and not _is_ordinary(words)


def _is_ordinary(words: Sequence[str]) -> bool:
    last = words[-1]
    ordinary = _ORDINARY.get(last if last == "pass" else last.removesuffix("s"), frozenset())
    return bool(ordinary.intersection(words[-2:-1]))


def _is_secret_number(words: Sequence[str], *, is_long: bool) -> bool:
    """Tell whether a number is a secret: not max_tokens, nor 12 secret_santa_rows."""
    is_pass = words[-1] == "pass" and _is_last(words, 0)
    return _is_strong(words[-1]) or (is_long and (is_pass or _has_strong(words)))


def _without_user(found: re.Match[str]) -> str:
    is_no_secret = ":" not in found["user"] and found["scheme"].lower() in _USER_IS_NO_SECRET
    return found[0] if is_no_secret else f"{found['scheme']}://{HIDDEN}@"


def _without_named(text: str) -> str:
    """Hide what follows a secret's name: `NAME=x`, `name: x`, `"name": "x"`, `--name x`."""
    shown, end = [], 0
    for head in _HEAD.finditer(text):
        if head.start() < end or not (value := _value_after(head)):
            continue
        quote = found[0] if (found := re.match(r"\\*[\"']", value)) else ""
        shown += [text[end : head.end()], f"{quote}{HIDDEN}{quote}"]
        end = head.end() + len(value)
    return "".join([*shown, text[end:]])


def _value_after(head: re.Match[str]) -> str:
    """Return the secret that follows a name; nothing if none does."""
    text, name, at = head.string, head["name"], head.end()
    words, before = _words_of(name), text[max(0, head.start() - 2) : head.start()]
    is_in_query = before[-1:] in {"?", "&"}
    is_of_query = is_in_query and _IN_QUERY.search(name) and not _is_ordinary(words)
    may_be = is_of_query or (words and (words[-1] in _LAST or _has_strong(words)))
    if not may_be or (head["gap"] and not _is_option(head, before)) or _IS_HIDDEN.match(text, at):
        return ""
    if text[at - 1] == ":" and (before == "//" or text.startswith("//", at)):  # a URL's
        return ""
    kind = _OF_QUERY if is_in_query else _HEADER if {"authorization", "auth"} & {*words} else _BARE
    found = _QUOTED.match(text, at)
    value = found[0] if found else _match(kind, text, at).rstrip(_CLOSING)
    if _NUMBER.fullmatch(value) and not is_of_query:
        return value if _is_secret_number(words, is_long=len(value) >= _MIN_DIGITS) else ""
    return value if is_of_query or is_secret(name, value) else ""


def _match(kind: re.Pattern[str], text: str, at: int) -> str:
    return found[0] if (found := kind.match(text, at)) else ""


def _is_option(head: re.Match[str], before: str) -> bool:
    """Tell whether what follows a name after a gap is its value: not in prose, nor after a flag."""
    after = _HEAD.match(head.string, head.end())
    is_flag = after is not None and after["name"].startswith("-") and is_secret(after["name"])
    is_alone = not before or before[-1].isspace() or before[-1] in "\"'"
    return head["name"].startswith("-") and is_alone and not is_flag


def _is_random(value: Any) -> bool:
    text = value if isinstance(value, str) else ""
    kinds = (str.isdigit, str.isalpha)
    return len(text) >= _MIN_RANDOM and " " not in text and all(any(map(k, text)) for k in kinds)
