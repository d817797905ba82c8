"""Why a gang stopped before its training's end, and the error that its caller gets. Pure."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from prefect_torch_ddp.errors import (
    GangCancelledError,
    GangError,
    GangGrowsError,
    RankFailedError,
    WorkerLostError,
)
from prefect_torch_ddp.gang.caller.plan import GangPlan
from prefect_torch_ddp.gang.caller.verdict.root_cause import SILENT_SETTLE_S
from prefect_torch_ddp.protocol.events import RankFailure, RankStopped
from prefect_torch_ddp.protocol.rank import RankPlace


@dataclass(frozen=True)
class EarlyStop:
    """What is known of ranks that stopped, and of why they had to."""

    stopped: Sequence[RankStopped] = ()
    failures: Sequence[RankFailure] = ()
    returned: Collection[int] = ()
    """The ranks whose functions have returned."""
    why_asked: str = ""
    """Why the caller asked the ranks to stop."""
    why_grows: str = ""
    why_agent_ended: str = ""
    """Why an agent ended that nobody asked to."""
    has_cancelled_agent: bool = False
    """Whether Dask cancelled an agent; that isn't known in time for each of them."""
    broken: GangError | None = None
    """What else than a rank failed; the stop is its consequence."""

    @property
    def is_cause(self) -> bool:
        """Whether ranks stopped early, and failed at most as a consequence.

        Code after the loop may find a model that isn't fully trained, and raise. A last checkpoint
        that can't be written, and a rank that was killed, count as failures.
        """
        ranks = {event.rank for event in self.stopped}
        return bool(self.stopped and self.broken is None) and all(
            each.is_collateral or (each.rank in ranks and _is_of_user_code(each))
            for each in self.failures
        )

    def settle_s(self, grace_s: float) -> float:
        """Return how long after a failure to wait for why the ranks stopped, and their checkpoint.

        Other ranks can fail before rank 0 has committed it, and the gang's end ends rank 0.

        Args:
            grace_s: how long ranks that are told to stop have for it.
        """
        if not self.is_cause:
            return 0.0
        if not self._is_explained:
            return SILENT_SETTLE_S
        is_over = 0 in {each.rank for each in self.failures} | {*self.returned}
        is_saved = any(event.stopped.is_saved for event in self.stopped)
        return 0.0 if is_over or is_saved else grace_s

    def error(self, plan: GangPlan, places: Sequence[RankPlace]) -> GangError | None:
        """Return the error of a gang that stopped early; None if it didn't, or isn't explained."""
        is_cancel = self.is_cause and self.has_cancelled_agent and not self.why_agent_ended
        if self.why_asked or is_cancel or isinstance(self.broken, GangCancelledError):
            return self._cancelled(plan)
        after = f" after step {self.stopped[0].stopped.step}" if self.stopped else ""
        if self.why_agent_ended and (self.is_cause or self._is_consequence):
            saved = [event.stopped.step for event in self.stopped if event.stopped.is_saved]
            text = f"{self.why_agent_ended}; the rest of the gang was stopped{after}"
            return WorkerLostError(text, max(filter(None, saved), default=None))
        if not self.is_cause or (self.failures and not self._is_explained):
            return None
        if self.why_grows:
            msg = f"{self.why_grows}; all ranks stopped{after}"
            return GangGrowsError(msg)
        if (terminated := self._terminated) is not None:
            summary = f"was ended by SIGTERM (15); all ranks stopped{after}"
            host = places[terminated.rank].host
            failure = RankFailure(terminated.rank, host, 0, "signal", summary, signal=15)
            return RankFailedError.from_failures(failure, plan.attempt)
        return self._cancelled(plan)

    def _cancelled(self, plan: GangPlan) -> GangCancelledError:
        """Return the error of a cancelled gang, with the step agreed on and its checkpoint."""
        from_outside = "cancelled from outside; its ranks were stopped"
        how = f"stopped by {self.why_asked}" if self.why_asked else from_outside
        step = self.stopped[0].stopped.step if self.stopped else None
        saved = [event.stopped.checkpoint_step for event in self.stopped]
        newest = next((step for step in saved if step is not None), None)
        return GangCancelledError(f"gang {plan.name!r} was {how}", step, newest)

    @property
    def _is_consequence(self) -> bool:
        """Whether nothing but an agent's end ended the gang: ranks failed by it, or were killed.

        They are killed if they don't end in time, maybe after they have saved.
        """
        are_collateral = all(each.is_collateral for each in self.failures)
        if self.broken is None:
            return bool(self.failures) and are_collateral
        return isinstance(self.broken, WorkerLostError) and are_collateral

    @property
    def _is_explained(self) -> bool:
        is_asked = self.why_asked or self.why_grows or self.why_agent_ended
        return bool(is_asked) or self.has_cancelled_agent or self._terminated is not None

    @property
    def _terminated(self) -> RankStopped | None:
        return next((event for event in self.stopped if event.stopped.by == "SIGTERM"), None)


def _is_of_user_code(failure: RankFailure) -> bool:
    is_ours = failure.exception_type.startswith("prefect_torch_ddp.")
    return failure.kind in ("exception", "exit") and not is_ours
