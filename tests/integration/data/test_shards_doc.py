"""What docs/images.md shows works as it stands."""

import importlib.util
import re
from pathlib import Path

from prefect_torch_ddp import RankContext, image_folder
from tests.integration.data.image_files import image_files, write_folder, write_objects

PAGE = (Path(__file__).parents[3] / "docs/images.md").read_text(encoding="utf-8")
WORKLOAD, CACHE = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def test_the_workload_packs_and_trains(tmp_path):
    """Its prepare packs a folder, its train reads the shards in place."""
    path = tmp_path / "my_shards.py"
    path.write_text(WORKLOAD, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("my_shards", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (tmp_path / "data").mkdir()
    images = write_folder(tmp_path / "images", image_files(20))
    with RankContext.local(tmp_path / "data", source=images, stage="prepare") as ctx:
        module.prepare(ctx)
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == [
        "shard-000000.tar",
        "shards.jsonl.gz",
    ]
    with RankContext.local(tmp_path / "data") as ctx:
        assert module.train(ctx) == {"steps": 6}


def test_the_cache_in_a_line(chain_s3_server, tmp_path):
    """A bucket by its URI, read through a folder on local disk."""
    write_objects(chain_s3_server.storage("images"), image_files(10))
    found = {"image_folder": image_folder, "transform": None}
    exec(CACHE.replace("/local/disk", str(tmp_path)), found)
    assert len(found["dataset"].__getitems__(range(10))) == 10
    assert len(list(tmp_path.glob("cache/v1/*/??/*"))) == 10
