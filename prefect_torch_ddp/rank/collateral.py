"""Owns the decision whether a rank's exception is a cause or the consequence of another rank's failure. Pure."""

import re

# What gloo, NCCL and TCPStore say when a peer goes away; gathered from killed, exited and raising peers on torch 2.11 to 2.15.
_PEER_GONE = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|connection reset by peer|broken pipe|gloo/transport|"
    r"application timeout caused pair closure|nccl (error|communicator)|remote process exited|"
    r"failed to recv, got 0 bytes|timed out waiting .*ms for (recv|send) operation|socket closed|"
    r"connectFullMesh failed|failed to connect to .* store",
    re.IGNORECASE,
)
_DISTRIBUTED_ERRORS = {"DistBackendError", "DistNetworkError", "DistStoreError"}


def is_collateral(error: BaseException) -> bool:
    """Tell whether what went wrong first was a connection to another rank.

    The first exception of the chain decides: a cleanup that fails because its peers are gone doesn't turn a cause into a
    consequence, and user code that wraps a closed connection in an error of its own doesn't turn a consequence into a cause.
    """
    first = error
    seen = {id(first)}
    while (before := first.__cause__ or first.__context__) is not None and id(before) not in seen:
        seen.add(id(before))
        first = before
    if type(first).__name__ in _DISTRIBUTED_ERRORS:
        return True
    # The user's own network trouble (a requests or socket error) is his, whatever its text.
    return type(first) is RuntimeError and _PEER_GONE.search(_text(first)) is not None


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException:  # noqa: BLE001 - an argument's own __str__ may raise anything
        return ""
