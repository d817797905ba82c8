"""What all integrations refuse."""

from pathlib import Path

import pytest

from prefect_torch_ddp import RankContext
from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.integrations.refused import refuse_other_ranks

PATTERN = "generators-*.pt"


@pytest.mark.parametrize(
    ("files", "says"),
    [
        (["generators-0.pt", "a"], None),
        (["generators-0.pt", "generators-1.pt"], "of 2 ranks and this gang has 1: Lightning would"),
        (["a"], r"no generators-\*\.pt, which attach writes: another program made it"),
    ],
    ids=["as many", "more", "another program"],
)
def test_a_commit_of_other_ranks_is_refused(
    tmp_path: Path, files: list[str], says: str | None
) -> None:
    """So is one that `attach` didn't write; before there is one, nothing is."""
    for name in files:
        (tmp_path / "made" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "made" / name).touch()
    with RankContext.local(storage=tmp_path / "store") as ctx:
        refuse_other_ranks(ctx, "Lightning", PATTERN)
        ctx.commit(tmp_path / "made", step=1)
    with RankContext.local(storage=tmp_path / "store") as ctx:
        if says is None:
            refuse_other_ranks(ctx, "Lightning", PATTERN)
            return
        with pytest.raises(InvalidParamsError, match=says):
            refuse_other_ranks(ctx, "Lightning", PATTERN)
