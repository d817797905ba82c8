"""The attempt log of a run: attempts and failures in its storage, and what ranks left."""

from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from prefect_torch_ddp.checkpoint.attempts import (
    claim_attempt,
    claim_attempt_after,
    read_failures,
    write_failure,
)
from prefect_torch_ddp.protocol.events import FailureRecord, RecordsLeft
from prefect_torch_ddp.records.log import put_part
from prefect_torch_ddp.records.rank_log import LogFolder
from prefect_torch_ddp.storage.protocol import Storage

MAX_PARALLEL = 16


@dataclass
class RunAttemptLog:
    """Claims the attempts of one task run, each of which fences off those before it."""

    storage: Storage
    run_id: str
    knows_steps: bool
    """Whether its function makes its steps by `ctx.steps`, as a workload does."""
    _own_attempt: int | None = None

    @property
    def logs(self) -> LogFolder:
        """Where the ranks' lines are kept."""
        return LogFolder(self.storage, self.run_id)

    def begin(self) -> int:
        """Claim the next attempt: any at first, then the one that follows this task run's own.

        Raises:
            SupersededError: the training was begun elsewhere meanwhile, since this task run counted
                as lost.
            NewerFormatError: a failure on record is of a newer format.
        """
        if self._own_attempt is None:
            # All are read again once the training has ended, which is too late to refuse one.
            read_failures(self.storage, self.run_id)
            self._own_attempt = claim_attempt(self.storage, self.run_id)
        else:
            self._own_attempt = claim_attempt_after(self.storage, self.run_id, self._own_attempt)
        return self._own_attempt

    def last_failure(self) -> FailureRecord | None:
        """Return the newest failure on record."""
        failures = read_failures(self.storage, self.run_id)
        return failures[-1] if failures else None

    def keep_failure(self, failure: FailureRecord) -> None:
        """Put a failure on record."""
        write_failure(self.storage, self.run_id, failure)

    def keep_records(self, left: Sequence[RecordsLeft]) -> None:
        """Write them as the ranks would have, each rank's in order.

        Raises:
            StorageError: some can't be written; the others are.
        """
        by_rank: defaultdict[str, list[RecordsLeft]] = defaultdict(list)
        for part in left:
            by_rank[part.key.rpartition("/")[0]].append(part)

        def keep(parts: list[RecordsLeft]) -> None:
            for part in parts:
                put_part(self.storage, part.key, part.content)

        with ThreadPoolExecutor(MAX_PARALLEL, thread_name_prefix="keep-records") as pool:
            list(pool.map(keep, by_rank.values()))
