"""Owns the state of a rank's random generators: python's, numpy's, torch's and CUDA's."""

import random
from typing import Any

import numpy as np
import torch


def capture_generators() -> dict[str, Any]:
    """Return the state of all global generators, as tensors and plain values."""
    version, words, gauss = random.getstate()
    _, keys, position, has_gauss, cached = np.random.get_state(legacy=True)  # noqa: NPY002 - the global one is what user code draws from
    state: dict[str, Any] = {
        "python": {"version": version, "words": torch.tensor(words, dtype=torch.int64, device="cpu"), "gauss": gauss},
        "numpy": {
            "keys": torch.tensor(np.asarray(keys).astype(np.int64), device="cpu"),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached": float(cached),
        },
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        # Only this rank's device: asking for the others would make a context on each.
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_generators(state: dict[str, Any]) -> None:
    """Put the generators back; a device that either side lacks is left alone."""
    python, numpy = state["python"], state["numpy"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    keys = numpy["keys"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", keys, numpy["position"], numpy["has_gauss"], numpy["cached"]))  # noqa: NPY002
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
