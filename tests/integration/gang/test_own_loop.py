"""A training in a loop of its own, without ctx.steps: what it resumes from is the newest
checkpoint that it asked for."""

from collections.abc import Callable

import pytest

from tests.support.kill_points import MANIFEST, Backend, KillPoint
from tests.support.killing_storage import Kill
from tests.support.killing_wire import WireKill
from tests.workloads.killed import Plan

pytestmark = pytest.mark.extended

MODEL, UNHEARD = r"model\.pt$", "the answer is not heard"
KILLS = {
    "in a round": (Kill(1, "backward", rank=1, step=6),),
    "behind a round": (Kill(1, "end", rank=0, step=7),),
    "mid-save": (Kill(1, "write", key=MODEL, moment="torn", nth=3),),
    "mid-save on rank 1": (Kill(1, "write", rank=1, key=r"\.pt$", moment="after", nth=4),),
    "before the commit": (Kill(1, "write_if_absent", key=MANIFEST, nth=3),),
    "within the commit": (Kill(1, "write_if_absent", key=MANIFEST, moment="within", nth=2),),
    "behind the commit": (Kill(1, "write_if_absent", key=MANIFEST, moment="after", nth=2),),
    "at the last commit": (Kill(1, "write_if_absent", key=MANIFEST, moment="after", nth=5),),
    "in the clean-up": (Kill(1, "delete", moment="after", nth=2),),
    "twice": (
        Kill(1, "begin", rank=0, step=6),
        Kill(2, "write_if_absent", key=MANIFEST, moment="after"),
    ),
}


def point(name: str, backend: Backend) -> KillPoint:
    """Make the kill point: each time the next attempt follows at once."""
    unheard = WireKill(1, "PUT", r"manifest\.json", "after", nth=2)
    kills, wire_kills = KILLS.get(name, ()), (unheard,) if name == UNHEARD else ()
    sizes = (2,) * (len(kills) + len(wire_kills) + 1)
    return KillPoint(name, backend, kills, wire_kills, sizes, Plan("", in_own_loop=True))


@pytest.mark.parametrize("name", KILLS)
def test_on_a_directory(strike_at: Callable[[KillPoint], None], name: str) -> None:
    """Wherever it is killed, it ends as if it had not been: also its data and its dropout,
    which the global generators draw."""
    strike_at(point(name, "directory"))


@pytest.mark.usefixtures("open_s3_server")
@pytest.mark.parametrize(
    "name", ["behind a round", "before the commit", "behind the commit", UNHEARD]
)
def test_on_s3(strike_at: Callable[[KillPoint], None], name: str) -> None:
    """The same on a real server, also where the commit is done and nobody heard of it."""
    strike_at(point(name, "s3"))
