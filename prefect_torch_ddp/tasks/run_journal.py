"""Owns the journal of a run's attempts in its storage: counted, and their failures remembered, across Prefect's retries."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from prefect_torch_ddp.checkpoint.attempts import claim_attempt, claim_attempt_after
from prefect_torch_ddp.checkpoint.failures import read_failures, write_failure
from prefect_torch_ddp.messages import FailureRecord, RecordsLeft
from prefect_torch_ddp.storage.protocol import Storage
from prefect_torch_ddp.storage.record_batch import put_part

MAX_PARALLEL = 16


@dataclass
class RunJournal:
    """Claims the attempts of a run, each of which fences off those before it. One task run has one."""

    storage: Storage
    run_id: str
    knows_steps: bool
    """Whether its function makes its steps by `rank.steps`, as a workload does."""
    _own_attempt: int | None = None

    def begin(self) -> int:
        """Claim the next attempt: any at first, then the one that follows this task run's own.

        Raises:
            SupersededError: the training was begun elsewhere meanwhile, since this task run was taken for lost.
        """
        if self._own_attempt is None:
            self._own_attempt = claim_attempt(self.storage, self.run_id)
        else:
            self._own_attempt = claim_attempt_after(self.storage, self.run_id, self._own_attempt)
        return self._own_attempt

    def last_failure(self) -> FailureRecord | None:
        """Return the newest failure on record."""
        failures = read_failures(self.storage, self.run_id)
        return failures[-1] if failures else None

    def record_failure(self, record: FailureRecord) -> None:
        """Put a failure on record."""
        write_failure(self.storage, self.run_id, record)

    def keep_records(self, left: Sequence[RecordsLeft]) -> None:
        """Write them as the ranks would have, each rank's in order.

        Raises:
            StorageError: some can't be written; the others are.
        """
        by_rank: dict[str, list[RecordsLeft]] = {}
        for part in left:
            by_rank.setdefault(part.key.rpartition("/")[0], []).append(part)
        with ThreadPoolExecutor(max_workers=MAX_PARALLEL, thread_name_prefix="keep-records") as pool:
            done = [pool.submit(self._keep, parts) for parts in by_rank.values()]
        for each in done:
            each.result()

    def _keep(self, parts: Sequence[RecordsLeft]) -> None:
        for part in parts:
            put_part(self.storage, part.key, part.content)
