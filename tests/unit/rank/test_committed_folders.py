"""Folders that user code commits: whole or absent, found again, and never out of their root."""

import json
from pathlib import Path

import pytest
import torch

from prefect_torch_ddp import BadKeyError, CheckpointParams, InvalidParamsError, RankContext
from prefect_torch_ddp.checkpoint.files import name_below, open_files, without_doubles
from prefect_torch_ddp.checkpoint.keys import manifest_key
from prefect_torch_ddp.checkpoint.manifest import Manifest, ManifestObject, list_manifests
from prefect_torch_ddp.storage.directory import DirectoryStorage


def context(storage: Path, **chosen: object) -> RankContext:
    """Make a rank in this process, whose run is there."""
    policy = CheckpointParams(every_s=None, every_steps=2)
    return RankContext.local(storage=storage, checkpoint=policy, **chosen)


def commit(ctx: RankContext, step: int, **files: str) -> Path:
    """Write files into a folder of the step, and commit it."""
    folder = ctx.checkpoint_folder / f"step-{step}"
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    ctx.commit(folder, step=step)
    return folder


def steps(storage: Path) -> list[int]:
    """Return the steps of the commits that count."""
    return [found.step for found in list_manifests(DirectoryStorage(storage), "local")]


def test_another_attempt_finds_the_newest_commit(tmp_path: Path) -> None:
    """It lies under its name in an otherwise empty folder, at any depth, byte for byte."""
    with context(tmp_path) as ctx:
        assert ctx.committed is None
        for step in (1, 2, 3):
            commit(ctx, step, a=f"a{step}", **{"deep/er/b": "b" * step})
    assert not ctx.checkpoint_folder.exists()
    assert steps(tmp_path) == [2, 3], "retention"
    with context(tmp_path) as ctx:
        assert ctx.committed == ctx.checkpoint_folder / "step-3"
        assert list(ctx.checkpoint_folder.iterdir()) == [ctx.committed]
        assert (ctx.committed / "a").read_text() == "a3"
        assert (ctx.committed / "deep/er/b").read_text() == "bbb"
        with pytest.raises(InvalidParamsError, match="step 2, and this run needs 3 or a later one"):
            commit(ctx, 2, a="")
        commit(ctx, 3, a="again")
        with pytest.raises(InvalidParamsError, match="needs 4 or a later one"):
            ctx.commit(ctx.committed, step=3)
    with context(tmp_path) as ctx:
        assert (ctx.committed / "a").read_text() == "again"


def test_the_folder_itself_can_be_committed(tmp_path: Path) -> None:
    """Its files are then found in it."""
    with context(tmp_path) as ctx:
        torch.save({"x": torch.ones(2)}, ctx.checkpoint_folder / "last.pt")
        ctx.commit(ctx.checkpoint_folder, step=7)
    with context(tmp_path) as ctx:
        assert ctx.committed == ctx.checkpoint_folder
        assert torch.load(ctx.committed / "last.pt", weights_only=True)["x"].tolist() == [1, 1]


def test_a_folder_may_be_deleted_at_once_but_not_changed(tmp_path: Path) -> None:
    """What was deleted is written all the same; what was changed is refused by its name."""
    with context(tmp_path / "deleted") as ctx:
        folder = commit(ctx, 1, a="whole")
        (folder / "a").unlink()
    with context(tmp_path / "deleted") as ctx:
        assert (ctx.committed / "a").read_text() == "whole"
    (tmp_path / "a").write_text("whole")
    opened = open_files(tmp_path, "step-1", ["a"])[0]
    (tmp_path / "a").write_text("changed")
    with pytest.raises(InvalidParamsError, match=r"step-1/a was changed after ctx.commit"):
        opened.read()
    opened.close()


def test_a_half_written_commit_does_not_count(tmp_path: Path) -> None:
    """If a file isn't what was written, the commit before it is taken, and nothing of it stays."""
    with context(tmp_path) as ctx:
        commit(ctx, 1, a="first")
        commit(ctx, 2, a="second", b="whole")
    storage = DirectoryStorage(tmp_path)
    newest = list_manifests(storage, "local")[-1]
    storage.write(newest.objects[0].key, b"sec")
    with context(tmp_path) as ctx:
        assert (ctx.committed / "a").read_text() == "first"
        assert list(ctx.checkpoint_folder.iterdir()) == [ctx.committed]


@pytest.mark.parametrize("path", ["../outside", "/tmp/outside", "a/../../outside"])
def test_no_manifest_leads_out_of_the_folder(tmp_path: Path, path: str) -> None:
    """A path that would leave it is refused before anything is written."""
    with context(tmp_path) as ctx:
        commit(ctx, 1, a="text")
    key = manifest_key("local", 1, 1)
    storage = DirectoryStorage(tmp_path)
    manifest = list_manifests(storage, "local")[0]
    item = ManifestObject(**{**vars(manifest.objects[0]), "path": path})
    forged = Manifest(**{**vars(manifest), "objects": (item,)})
    storage.write(key, forged.as_bytes())
    assert json.loads(storage.read(key))["objects"][0]["path"] == path
    with pytest.raises(BadKeyError), context(tmp_path) as ctx:
        _ = ctx.checkpoint_folder


def test_what_is_no_plain_file_of_the_folder_is_refused(tmp_path: Path) -> None:
    """Links that lead out, links to folders, pipes and missing files, each by its name."""
    folder = tmp_path / "folder"
    (folder / "inner").mkdir(parents=True)
    (tmp_path / "outside").write_text("secret")
    (folder / "link").symlink_to(tmp_path / "outside")
    with pytest.raises(InvalidParamsError, match="leads out of the folder"):
        open_files(folder, "folder", None)
    with pytest.raises(InvalidParamsError, match=r"'folder/../outside' can't be the key"):
        open_files(folder, "folder", ["../outside"])
    with pytest.raises(InvalidParamsError, match="outside"):
        open_files(folder, "folder", [tmp_path / "outside"])
    (folder / "link").unlink()
    (folder / "link").symlink_to(folder / "inner")
    with pytest.raises(InvalidParamsError, match="is a link to a folder"):
        open_files(folder, "folder", None)
    with pytest.raises(InvalidParamsError, match="is missing"):
        open_files(folder, "folder", ["nothing"])
    with pytest.raises(InvalidParamsError, match=r"give a list of paths: files=\['a'\]"):
        open_files(folder, "folder", "a")
    with pytest.raises(InvalidParamsError, match="which is no folder"):
        open_files(folder / "nothing", "folder", None)
    assert name_below(tmp_path / "elsewhere/x", folder) == "x"


def test_a_file_of_two_ranks_has_to_be_the_same() -> None:
    """The same one is kept once; another one is refused, as is a folder in place of a file."""
    one, same = ManifestObject("f/a", "k1", 1, "d", rank=0, path="f/a"), "f/a"
    twice = ManifestObject(same, "k2", 1, "d", rank=1, path=same)
    other = ManifestObject(same, "k3", 1, "e", rank=1, path=same)
    below = ManifestObject("f/a/b", "k4", 1, "d", rank=1, path="f/a/b")
    assert without_doubles([one, twice], "f") == ((one,), [twice])
    for wrong, text in (
        ([one, other], "ranks 0 and 1 committed different files as f/a"),
        ([one, below], "f/a is a file on one rank and a folder on another"),
        ([], "a folder without files"),
    ):
        with pytest.raises(InvalidParamsError, match=text):
            without_doubles(wrong, "f")
    with pytest.raises(InvalidParamsError, match="the ranks commit different folders"):
        without_doubles([one], "g")


def test_a_training_has_one_kind_of_checkpoint(tmp_path: Path) -> None:
    """Tracked objects or folders, in one attempt and over all of a run."""
    with context(tmp_path / "both") as ctx:
        ctx.track(model=torch.nn.Linear(1, 1))
        with pytest.raises(InvalidParamsError, match=r"without ctx.track and ctx.steps"):
            _ = ctx.checkpoint_folder
    refused = pytest.raises(InvalidParamsError, match=r"no folder of ctx.commit")
    with context(tmp_path / "both") as ctx, refused:
        _ = ctx.checkpoint_folder
    with context(tmp_path / "folder") as ctx:
        commit(ctx, 1, a="text")
        with pytest.raises(InvalidParamsError, match=r"this training saves by ctx.commit"):
            ctx.track(model=torch.nn.Linear(1, 1))
    refused = pytest.raises(InvalidParamsError, match=r"is a folder, which ctx.commit made")
    with context(tmp_path / "folder") as ctx, refused:
        ctx.track(model=torch.nn.Linear(1, 1))


def test_a_preparation_commits_no_folder(tmp_path: Path) -> None:
    """It is no attempt of the run: its folders would be resumed by the training that follows."""
    ctx = RankContext.local(storage=tmp_path / "store", stage="prepare", data=tmp_path / "data")
    says = "ctx.checkpoint_folder in prepare: there is nothing to resume"
    with ctx, pytest.raises(InvalidParamsError, match=says):
        _ = ctx.checkpoint_folder
    with ctx, pytest.raises(InvalidParamsError, match=says):
        commit(ctx, 1, weights="1")
    assert steps(tmp_path / "store") == []


def test_what_is_due_at_a_steps_end(tmp_path: Path) -> None:
    """A checkpoint every second step, when it was asked for, and at a stop."""
    with context(tmp_path) as ctx:
        assert ctx.due(1) == (False, False)
        assert ctx.due(2) == (False, False), "nothing to save into"
        _ = ctx.checkpoint_folder
        ctx.checkpoint(force=True)
        assert ctx.due(3) == (True, False)
        assert ctx.due(4) == (True, False)
        assert ctx.due(5) == (False, False)
        with pytest.raises(InvalidParamsError, match="step 5 after step 5"):
            ctx.due(5)
        ctx.request_stop("enough")
        assert ctx.due(6) == (True, True)
        assert ctx.due(7) == (False, True)
    assert ctx.should_stop
