"""Random orders of attempts of one run: each resumes from one request of the storage to
its next, or is killed there."""

import random
import threading
from pathlib import Path
from typing import Any

import torch

from prefect_torch_ddp.checkpoint.attempts import claim_attempt
from prefect_torch_ddp.checkpoint.commit import Committer
from prefect_torch_ddp.checkpoint.keys import object_key
from prefect_torch_ddp.checkpoint.manifest import Manifest, ManifestObject, live_manifests
from prefect_torch_ddp.checkpoint.rank_store import open_rank_store
from prefect_torch_ddp.checkpoint.restore import Restorer, find_resumable
from prefect_torch_ddp.checkpoint.resume_point import ResumePoint
from prefect_torch_ddp.checkpoint.state.objects import content_digest, read_states
from prefect_torch_ddp.checkpoint.state.serial import to_bytes
from prefect_torch_ddp.errors import CheckpointError, SupersededError
from prefect_torch_ddp.params import CheckpointParams
from prefect_torch_ddp.storage.directory import DirectoryStorage
from prefect_torch_ddp.storage.protocol import Storage
from tests.support.forwarding import WatchedStorage
from tests.support.waiting import HANG_S


class KilledError(BaseException):
    """Ends an attempt at once, as SIGKILL does: it makes no further request to the storage."""


class Turns:
    """One attempt's: it makes a request when it is let go, and is heard of when it comes to the
    next one, or has ended."""

    def __init__(self) -> None:
        self.has_ended = False
        self._is_killed = False
        self._may_go, self._has_come = threading.Semaphore(0), threading.Semaphore(0)
        self._one_at_a_time = threading.Lock()

    def come(self, _request: str) -> None:
        """Wait for the turn; an attempt may read with several threads."""
        with self._one_at_a_time:
            if not self._is_killed:
                self._has_come.release()
                assert self._may_go.acquire(timeout=HANG_S)
            if self._is_killed:
                raise KilledError

    def end(self) -> None:
        self.has_ended = True
        self._has_come.release()

    def hear(self) -> None:
        """Wait until it has come to a request, or has ended."""
        assert self._has_come.acquire(timeout=HANG_S)

    def go(self, *, kill: bool) -> None:
        """Let it make its request, or kill it before that."""
        self._is_killed = kill
        self._may_go.release()
        self.hear()


class Lineage:
    """Tracked in place of a model: the steps that led to it, and whose they were."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, int]] = []

    def state_dict(self) -> dict[str, Any]:
        return {"steps": torch.tensor(self.steps)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = [(step, attempt) for step, attempt in state["steps"].tolist()]


class Order:
    """Two to four attempts of one run in an order of a seed."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.chance = random.Random(seed)
        self.retention = CheckpointParams(
            keep_last=self.chance.randint(1, 3),
            keep_best=1,
            best_metric=self.chance.choice([None, "value"]),
        )
        self.num_steps = self.chance.randint(2, 4)
        self.acknowledged: list[tuple[int, int]] = []
        """Step and attempt of each checkpoint that a training was informed of."""
        self.problems: list[str] = []

    def run(self) -> list[str]:
        """Run the attempts to their ends; return what went wrong."""
        to_begin = [Turns() for _ in range(self.chance.randint(2, 4))]
        change = self.chance.choice([0.05, 0.2, 0.5, 0.9])
        kill = self.chance.choice([0.0, 0.005, 0.02])
        living: list[Turns] = []
        at_turn: Turns | None = None
        threads = []
        while living or to_begin:
            if to_begin and (not living or self.chance.random() < 0.03):
                living.append(to_begin.pop())
                threads.append(threading.Thread(target=self._take_part, args=(living[-1],)))
                threads[-1].start()
                living[-1].hear()
            if at_turn not in living or self.chance.random() < change:
                at_turn = self.chance.choice(living)
            assert at_turn is not None
            if not at_turn.has_ended:
                at_turn.go(kill=self.chance.random() < kill)
            living = [turns for turns in living if not turns.has_ended]
        for thread in threads:
            thread.join(HANG_S)
        self._check()
        return self.problems

    def _take_part(self, turns: Turns) -> None:
        try:
            self._train(WatchedStorage(self.folder, turns.come))
        except (SupersededError, KilledError):
            pass
        except BaseException as error:  # noqa: BLE001 - in a thread nobody else would hear of it
            self.problems.append(repr(error))
        turns.end()

    def _train(self, storage: Storage) -> None:
        """Resume and commit a checkpoint of each step, as rank 0 does."""
        attempt = claim_attempt(storage, "run")
        lineage, own = Lineage(), ResumePoint(storage, "run")
        restorer = Restorer.choose(own, attempt, None, open_rank_store(1))
        restorer.restore("model", lineage)
        begun = restorer.manifest
        committer = Committer(storage, "run", attempt, self.retention)
        if begun is not None and begun.step == self.num_steps:
            committer.clean_up(begun)
            self.acknowledged.append(lineage.steps[-1])
        for step in range(1 if begun is None else begun.step + 1, self.num_steps + 1):
            lineage.steps.append((step, attempt))
            key, data = object_key("run", step, attempt, "model"), to_bytes(lineage.state_dict())
            storage.write(key, data)
            model = ManifestObject("model", key, len(data), content_digest(data))
            value = {"value": self.chance.random()}
            committer.commit(Manifest("run", step, attempt, 1, {}, 1, value, (model,)))
            self.acknowledged.append((step, attempt))

    def _check(self) -> None:
        """What was acknowledged is in the history of the checkpoint that a resume finds, and
        what counts is whole and in it."""
        storage = DirectoryStorage(self.folder)
        found = find_resumable(storage, "run")
        if found is None:
            if self.acknowledged:
                self.problems.append(f"all is lost; acknowledged were {self.acknowledged}")
            return
        lineage = Lineage()
        lineage.load_state_dict(found[1]["model"])
        self.problems += [
            f"{step} isn't in {lineage.steps}"
            for step in self.acknowledged
            if step not in lineage.steps
        ]
        for manifest in live_manifests(storage, "run"):
            try:
                read_states(storage, manifest, manifest.objects)
            except CheckpointError as error:
                self.problems.append(str(error))
            owner = manifest.step, manifest.attempt
            if owner not in lineage.steps:
                self.problems.append(f"{owner} counts and isn't in {lineage.steps}")
