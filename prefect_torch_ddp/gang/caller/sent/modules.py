"""Modules of classes that cloudpickle can't send, such as `torch.classes` and `torch.backends`."""

import copyreg
import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


def let_modules_be_sent() -> None:
    """Have modules that belong to a subclass of ModuleType be pickled by their names.

    cloudpickle sends a function with every submodule that its attributes may mean. A function
    that uses `torch` and the `.classes` of an image folder is sent with `torch.classes`, and one
    that sets `torch.backends.cudnn.benchmark` with `torch.backends`. Both are of such subclasses,
    which cloudpickle doesn't take for modules.
    """
    for module in list(sys.modules.values()):
        kind = type(module)
        is_special = isinstance(module, ModuleType) and kind is not ModuleType
        if is_special and kind.__reduce__ is object.__reduce__:
            copyreg.pickle(kind, _by_name)


def _by_name(module: ModuleType) -> tuple[Callable[..., Any], tuple[str]]:
    return importlib.import_module, (module.__name__,)
