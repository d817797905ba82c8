"""Owns the checks of run_gang's arguments: each names the value and what to give instead,
before anything starts. Pure.
"""

import ipaddress
import math
import re
from collections.abc import Mapping, Sequence

from distributed import Client

from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.gang.caller.placement import is_network

IMPORT_STRING = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


def check_client(client: object) -> None:
    """Refuse anything but a connected, synchronous client."""
    if not isinstance(client, Client) or client.asynchronous:
        msg = f"client is {client!r}; run_gang needs a synchronous distributed.Client"
        raise InvalidParamsError(msg)
    if client.status != "running":
        msg = f"client is {client.status}; connect it to a Dask scheduler first"
        raise InvalidParamsError(msg)


def check_call(fn: object, args: object, kwargs: object) -> None:
    """Refuse a function or arguments that can't be called."""
    is_named = isinstance(fn, str) and (
        fn.endswith(".py") or IMPORT_STRING.fullmatch(fn) is not None
    )
    if not callable(fn) and not is_named:
        msg = (
            f"fn is {fn!r}; give a callable, 'package.module:function', or the path of a .py script"
        )
        raise InvalidParamsError(msg)
    if isinstance(args, str | bytes) or not isinstance(args, Sequence):
        msg = f"args is {args!r}; give a sequence, e.g. args=({args!r},)"
        raise InvalidParamsError(msg)
    if kwargs is not None and (
        not isinstance(kwargs, Mapping) or any(not isinstance(key, str) for key in kwargs)
    ):
        msg = f"kwargs is {kwargs!r}; give a mapping whose keys are strings"
        raise InvalidParamsError(msg)


def check_choice(label: str, value: object, allowed: tuple[str, ...]) -> None:
    """Refuse a value that isn't one of those allowed."""
    if value not in allowed:
        msg = f"{label} is {value!r}; choose one of {', '.join(allowed)}"
        raise InvalidParamsError(msg)


def check_counts(*, world_size: object, ranks_per_worker: object) -> None:
    """Refuse counts that aren't whole numbers of at least 1; world_size may be None."""
    for label, value in (("world_size", world_size), ("ranks_per_worker", ranks_per_worker)):
        if label == "world_size" and value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            msg = f"{label} is {value!r}; give a whole number of at least 1"
            raise InvalidParamsError(msg)


def check_restarts(max_restarts: object, min_world_size: object, world_size: int | None) -> None:
    """Refuse a count of restarts or a least size that can't be."""
    if not isinstance(max_restarts, int) or isinstance(max_restarts, bool) or max_restarts < 0:
        msg = f"max_restarts is {max_restarts!r}; give a whole number of at least 0"
        raise InvalidParamsError(msg)
    if min_world_size is None:
        return
    check_counts(world_size=world_size, ranks_per_worker=1)
    if (
        not isinstance(min_world_size, int)
        or isinstance(min_world_size, bool)
        or min_world_size < 1
    ):
        msg = f"min_world_size is {min_world_size!r}; give a whole number of at least 1, or None"
        raise InvalidParamsError(msg)
    if world_size is not None and min_world_size > world_size:
        msg = f"min_world_size is {min_world_size} and world_size {world_size}; give a min_world_size of at most world_size"
        raise InvalidParamsError(msg)


def check_divides(divides: object, world_size: int | None, min_world_size: int | None) -> None:
    """Refuse a number that the ranks' number has to divide and can't; None allows any number of
    ranks.
    """
    if divides is None:
        return
    if not isinstance(divides, int) or isinstance(divides, bool) or divides < 1:
        msg = f"world_size_divides is {divides!r}; give a whole number of at least 1, or None"
        raise InvalidParamsError(msg)
    if world_size is not None and divides % world_size:
        msg = f"world_size is {world_size} and has to divide {divides}; give one that does"
        raise InvalidParamsError(msg)
    if min_world_size is not None and min_world_size > divides:
        msg = f"min_world_size is {min_world_size}, and the number of ranks has to divide {divides}; give at most that"
        raise InvalidParamsError(msg)


def check_limits(**limits_s: object) -> None:
    """Refuse time limits that aren't positive; None is no limit."""
    for label, value in limits_s.items():
        if value is not None and not (
            isinstance(value, int | float) and value > 0 and math.isfinite(value)
        ):
            msg = f"{label} is {value!r}; give a positive number of seconds"
            raise InvalidParamsError(msg)


def check_resources(resources: object) -> None:
    """Refuse resources that aren't names with positive amounts; None is none."""
    if resources is None:
        return
    if not isinstance(resources, Mapping) or not all(
        isinstance(name, str)
        and isinstance(amount, int | float)
        and not isinstance(amount, bool)
        and 0 < amount < math.inf
        for name, amount in resources.items()
    ):
        msg = f"resources is {resources!r}; give positive amounts by name, e.g. {{'GPU': 1}}"
        raise InvalidParamsError(msg)


def check_interface(interface: object) -> None:
    """Refuse what is neither an interface's name nor a network; None leaves the choice to
    us.
    """
    if interface is None:
        return
    hint = (
        "give an interface's name, e.g. 'ib0', or a network, e.g. '10.1.0.0/16' or '::/0' for IPv6"
    )
    if not isinstance(interface, str) or not interface:
        msg = f"interface is {interface!r}; {hint}"
        raise InvalidParamsError(msg)
    if is_network(interface):
        try:
            ipaddress.ip_network(interface, strict=False)
        except ValueError as error:
            msg = f"interface is {interface!r}, which is no network ({error}); {hint}"
            raise InvalidParamsError(msg) from error
