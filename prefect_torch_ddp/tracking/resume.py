"""Which run a new one resumes from: the one that is named, the latest, or the best."""

import math
from collections.abc import Sequence
from contextlib import suppress
from itertools import takewhile
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.exceptions import ObjectNotFound
from prefect.logging import get_run_logger
from prefect.utilities.context import get_flow_run_id

from prefect_torch_ddp.blocks import resolve_storage
from prefect_torch_ddp.checkpoint.manifest import list_manifests, ranked
from prefect_torch_ddp.checkpoint.resume_point import ResumePoint, parse_resume_from
from prefect_torch_ddp.params import ContextParams
from prefect_torch_ddp.records.run_record import RunRecord, list_records
from prefect_torch_ddp.storage.protocol import Storage


def resume_point(
    params: ContextParams, own: Storage, run_id: str, experiment: str
) -> ResumePoint | None:
    """Find the checkpoint that a run begins from, which has to be there if it was named.

    A run that has its own checkpoints resumes from them: then it may be gone.

    Raises:
        InvalidParamsError, CheckpointError: there is none by that name, or it is damaged.
        StorageError: earlier runs can't be read.
    """
    reference = params.resume_from
    if reference is None:
        return None
    if reference in {"latest", "best"}:
        earlier = [each for each in list_records(own, experiment) if each.run_id != run_id]
        choose = _latest if reference == "latest" else _best
        found = choose(own, earlier, params)
        words = "resume_from=%r: %s"
        none = (
            f"{experiment} has no such run in {own.uri}, so this one starts from the beginning; to "
            "continue a run of another flow, deployment or task, give its id"
        )
        said = found.uri if found else none
        get_run_logger().info(words, reference, said)
        return found
    point = parse_resume_from(reference, own, resolve_storage)
    if not list_manifests(own, run_id):
        point.find()
    return point


def weights_from(point: ResumePoint | None) -> str | None:
    """Return the run of which a run loads only the weights, if there is one."""
    return point.run_id if point is not None and point.only_weights else None


def _latest(
    own: Storage, earlier: Sequence[RunRecord], params: ContextParams
) -> ResumePoint | None:
    """Return the newest run that didn't finish and has a checkpoint; none once one finished.

    Or what a newer one was to begin from, if it ended before its first checkpoint.
    """
    over = (each for each in earlier if not still_trains(each))
    for record in takewhile(lambda each: each.state != "completed", over):
        if list_manifests(own, record.run_id):
            return ResumePoint(own, record.run_id)
        began_from = record.parameters.get("resume_from")
        if began_from == "best":
            return _best(own, earlier, params)
        if isinstance(began_from, str) and began_from != "latest":
            point = parse_resume_from(began_from, own, resolve_storage)
            point.find()  # it may have been deleted meanwhile
            return point
    return None


def still_trains(record: RunRecord) -> bool:
    """Whether a run continues in this very flow run, or in another that hasn't ended for Prefect.

    That is also one which was suspended: its record says cancelled, as the training did stop. What
    this very flow run cancelled is over: it was resumed or retried, and its tasks have new ids.
    """
    if record.state not in ("training", "cancelled") or record.flow_run_id is None:
        return False
    if record.state == "cancelled" and record.flow_run_id == str(get_flow_run_id()):
        return False
    with get_client(sync_client=True) as client, suppress(ObjectNotFound):
        state = client.read_flow_run(UUID(record.flow_run_id)).state
        return state is not None and not state.is_final()
    return False


def _best(own: Storage, earlier: Sequence[RunRecord], params: ContextParams) -> ResumePoint | None:
    """Return the best checkpoint of the best completed run by the metric that chooses checkpoints.

    Without such a metric, the newest run's.
    """
    metric, sign = params.checkpoint.best_metric, 1 if params.checkpoint.best_is == "max" else -1

    def score(value: float | None) -> float:
        return sign * value if value is not None and math.isfinite(value) else -math.inf

    done = [each for each in earlier if each.state == "completed"]
    of_run = {each.run_id: each.best_value if each.best_metric == metric else None for each in done}
    # A stable sort: of equals the newest.
    for run_id in sorted(of_run, key=lambda each: score(of_run[each]), reverse=True):
        found = list_manifests(own, run_id)
        by_metric = [] if metric is None else ranked(found, metric, params.checkpoint.best_is)
        for best in [*by_metric, *reversed(found)]:
            return ResumePoint(own, run_id, best.step, best.attempt, only_weights=True)
    return None
