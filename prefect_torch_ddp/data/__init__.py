"""The data a training reads: exact sample order, prepared datasets, and image folders anywhere.

Modules here know neither Dask nor Prefect, and learn a rank's number and the world size as
plain integers. `images/` holds datasets that know nothing of ranks. Names load on first use.
"""

from prefect_torch_ddp.lazy import lazy_names as _lazy_names

__getattr__, __dir__, __all__ = _lazy_names(__name__)
