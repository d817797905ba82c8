"""Owns the journal of a run's attempts in its storage: counted, and their failures remembered, across Prefect's retries."""

from dataclasses import dataclass

from prefect_torch_ddp.checkpoint.attempts import claim_attempt
from prefect_torch_ddp.checkpoint.failures import read_failures, write_failure
from prefect_torch_ddp.messages import FailureRecord
from prefect_torch_ddp.storage.protocol import Storage


@dataclass(frozen=True)
class RunJournal:
    """Claims the attempts of a run, each of which fences off those before it."""

    storage: Storage
    run_id: str
    knows_steps: bool
    """Whether its function makes its steps by `rank.steps`, as a workload does."""

    def begin(self) -> int:
        """Claim the next attempt."""
        return claim_attempt(self.storage, self.run_id)

    def last_failure(self) -> FailureRecord | None:
        """Return the newest failure on record."""
        failures = read_failures(self.storage, self.run_id)
        return failures[-1] if failures else None

    def record_failure(self, record: FailureRecord) -> None:
        """Put a failure on record."""
        write_failure(self.storage, self.run_id, record)
