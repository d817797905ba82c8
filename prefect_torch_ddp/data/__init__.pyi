# The public names: what type checkers read, and what `__init__.py` opens when first used.
from prefect_torch_ddp.data.arrays.array import array as array
from prefect_torch_ddp.data.images.cache import CachedReads as CachedReads
from prefect_torch_ddp.data.images.folder import S3ImageFolder as S3ImageFolder
from prefect_torch_ddp.data.images.folder import image_folder as image_folder
from prefect_torch_ddp.data.images.listing import write_index as write_index
from prefect_torch_ddp.data.lookahead import LookAhead as LookAhead
from prefect_torch_ddp.data.preparing import read_files as read_files
from prefect_torch_ddp.data.preparing import seeded_split as seeded_split
from prefect_torch_ddp.data.shards import Sharded as Sharded
from prefect_torch_ddp.data.tables.table import table as table
