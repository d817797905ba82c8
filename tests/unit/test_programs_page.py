"""The code of docs/programs.md runs as it stands there."""

import re
from pathlib import Path

from prefect_torch_ddp import CheckpointParams, RankContext

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/programs.md").read_text(encoding="utf-8")


def test_the_loop_of_the_page_resumes(tmp_path: Path) -> None:
    """In two attempts it ends with the loss of one."""
    names: dict[str, object] = {}
    (code,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    exec(compile(code, "docs/programs.md", "exec"), names)

    def run(folder: str, total: int) -> object:
        policy = CheckpointParams(every_steps=2)
        with RankContext.local(storage=tmp_path / folder, checkpoint=policy) as ctx:
            return names["train"](ctx, total)

    straight = run("straight", 6)
    run("resumed", 3)
    assert run("resumed", 6) == straight
    assert run("resumed", 6) == straight, "after its last step, too"
