"""The generators that loaders, their samplers and datasets hold: torch's, NumPy's and Python's."""

import logging
import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, Sampler

MAX_ITEMS = 64
"""Lists, tuples and dicts of more items aren't searched: they may be a dataset's samples."""
_KINDS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)

logger = logging.getLogger(__name__)


def capture_own(loaders: Iterable[Any]) -> list[tuple[str, Any]]:
    """Return kind and state of each generator, as `torch.load(weights_only=True)` takes them."""
    return [(type(each).__name__, _state_of(each)) for each in _found_in(loaders)]


def restore_own(loaders: Iterable[Any], kept: list[tuple[str, Any]]) -> None:
    """Put the generators back. If they aren't those of then, none is, and a warning says so."""
    here = _found_in(loaders)
    then, now = [kind for kind, _ in kept], [type(each).__name__ for each in here]
    if then != now:
        text = (
            "the checkpoint has the states of other generators of DataLoaders, samplers and "
            "datasets (%s) than there are (%s): the batches may differ from those of an "
            "uninterrupted training"
        )
        logger.warning(text, ", ".join(then) or "none", ", ".join(now) or "none")
        return
    for generator, (_, state) in zip(here, kept, strict=True):
        _set_state(generator, state)


def _found_in(loaders: Iterable[Any]) -> list[Any]:
    found: list[Any] = []
    seen: set[int] = set()
    left = list(loaders)
    for each in left:  # grows: a sampler may be within another one
        for value in _held_by(each):
            if id(value) in seen:
                continue
            seen.add(id(value))
            if isinstance(value, _KINDS) and not isinstance(value, random.SystemRandom):
                found.append(value)
            elif isinstance(value, Sampler | Dataset | list | tuple | dict):
                left.append(value)
    return found


def _held_by(value: Any) -> list[Any]:
    if not isinstance(value, list | tuple | dict):
        return list(getattr(value, "__dict__", {}).values())
    if len(value) > MAX_ITEMS:
        return []
    return list(value.values() if isinstance(value, dict) else value)


def _state_of(generator: Any) -> Any:
    if isinstance(generator, np.random.Generator):
        return _converted(generator.bit_generator.state)
    if isinstance(generator, np.random.RandomState):
        return _converted(generator.get_state(legacy=False))
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = _converted(state)
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(_converted(state))
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)


def _converted(state: Any) -> Any:
    """Copy a state of NumPy's, its arrays as tensors and its tensors as arrays."""
    if isinstance(state, dict):
        return {name: _converted(value) for name, value in state.items()}
    if isinstance(state, np.ndarray):
        return torch.from_numpy(state.copy())
    return state.numpy() if isinstance(state, torch.Tensor) else state
