"""A rank whose function returns while its peers train on: a failure with a name, also where its
checkpoint waits for them."""

import re
from pathlib import Path

import pytest
from distributed import Client

from prefect_torch_ddp import RankFailedError, run_gang
from prefect_torch_ddp.params import CheckpointParams
from prefect_torch_ddp.rank.config import RankConfig
from prefect_torch_ddp.storage.directory import DirectoryStorage
from prefect_torch_ddp.tasks.run import RUN_WITH_CONTEXT
from tests.workloads import leaves_early

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("leaver", [0, 1])
def test_early_return_of_a_rank_that_tracks(
    dask_client: Client, tmp_path: Path, leaver: int
) -> None:
    """The rank that left is named, not the one that waited for it in vain."""
    config = RankConfig(
        "early", 1, "task", DirectoryStorage(tmp_path), checkpoint=CheckpointParams(every_s=None)
    )
    with pytest.raises(
        RankFailedError, match=re.escape("its function had already returned")
    ) as caught:
        run_gang(
            dask_client,
            RUN_WITH_CONTEXT,
            args=(config, leaves_early.train, (leaver,)),
            world_size=2,
        )
    assert caught.value.rank == leaver
    assert f"while rank {1 - leaver} waited for it in a collective" in str(caught.value)
