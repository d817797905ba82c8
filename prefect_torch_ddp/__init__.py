"""Any PyTorch function as a fault-tolerant distributed task of a Prefect flow, on its Dask cluster.

The public names are those of `__init__.pyi`. Each loads when first used: importing this package
loads neither prefect, nor distributed, nor torch.
"""

from prefect_torch_ddp.lazy import lazy_names as _lazy_names

__getattr__, __dir__, __all__ = _lazy_names(__name__)
