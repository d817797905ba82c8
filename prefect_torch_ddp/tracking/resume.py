"""Which run a new one resumes from: the one that is named or crashed, the latest, or the best."""

import math
from collections.abc import Sequence
from contextlib import suppress
from itertools import takewhile
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterParentFlowRunId
from prefect.client.schemas.objects import FlowRun
from prefect.exceptions import ObjectNotFound
from prefect.logging import get_run_logger
from prefect.settings import PREFECT_API_URL
from prefect.utilities.context import get_flow_run_id

from prefect_torch_ddp.blocks import resolve_storage
from prefect_torch_ddp.checkpoint.manifest import list_manifests, ranked
from prefect_torch_ddp.checkpoint.resume_point import ResumePoint, parse_resume_from
from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.params import ContextParams
from prefect_torch_ddp.records.run_record import (
    FLOW_RUN,
    RunRecord,
    is_choice,
    list_run_records,
)
from prefect_torch_ddp.server import local_api
from prefect_torch_ddp.storage.protocol import Storage

STATE = """{"state": {"type": "CRASHED"}, "force": true}"""
CLOSE = f"prefect api POST /flow_runs/%s/set_state --data '{STATE}'"
"""Closes a flow run whose process is gone. Prefect's UI can only cancel one that hasn't ended, and
nobody would notice that: it is Cancelling for ever then, and this closes it too."""


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
    if is_choice(reference):
        earlier = [each for each in list_run_records(own, experiment) if each.run_id != run_id]
        found = _chosen(reference, own, earlier, params)
        words = "resume_from=%r: %s"
        none = (
            f"{experiment} has no such run in {own.uri} that has ended, so this one starts from "
            "the beginning; to continue a run of another flow, deployment or task, give its id"
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


def began_from(params: ContextParams, point: ResumePoint | None, own: Storage) -> str | None:
    """Return what `latest` or a flow run's id led to, as `resume_from` names it.

    None if that is nothing, or only weights, or if the parameters name the run themselves.
    """
    reference = params.resume_from
    if reference is None or not is_choice(reference) or point is None or point.only_weights:
        return None
    return point.uri.removeprefix(f"{own.uri.rstrip('/')}/runs/")  # a storage may be moved


def _chosen(
    reference: str, own: Storage, earlier: Sequence[RunRecord], params: ContextParams
) -> ResumePoint | None:
    if reference == "latest":
        return _latest(own, earlier, params)
    if reference == "best":
        return _best(own, earlier, params)
    if reference.startswith(FLOW_RUN):
        return _crashed(reference.removeprefix(FLOW_RUN), own, earlier, params)
    point = parse_resume_from(reference, own, resolve_storage)
    point.find()  # it may have been deleted meanwhile
    return point


def _latest(
    own: Storage, earlier: Sequence[RunRecord], params: ContextParams
) -> ResumePoint | None:
    """Return the newest run that didn't finish and has a checkpoint; none once one has trained.

    Or what a newer one was to begin from, if it ended before its first checkpoint.
    """
    for record in takewhile(lambda each: not each.is_finished, earlier):
        if (flow_run := continues_in(record)) is not None:
            _warn_of(record, flow_run, own)
            if record.state == "completed":  # it is evaluated
                return None
            continue
        if list_manifests(own, record.run_id):
            return ResumePoint(own, record.run_id)
        began_from = record.parameters.get("resume_from")
        if isinstance(began_from, str) and began_from != "latest":
            return _chosen(began_from, own, earlier, params)
    return None


def _crashed(
    flow_run_id: str, own: Storage, earlier: Sequence[RunRecord], params: ContextParams
) -> ResumePoint | None:
    """Return the newest checkpoint of a flow run, or what it was to begin from if it has none.

    Raises:
        InvalidParamsError: Prefect has no such flow run.
    """
    try:
        crashed_id = UUID(flow_run_id)
        with get_client(sync_client=True) as client:
            crashed = client.read_flow_run(crashed_id)
            # A flow of the user's own may call train_flow.
            of_it = FlowRunFilterParentFlowRunId(any_=[crashed_id])
            inner = client.read_flow_runs(flow_run_filter=FlowRunFilter(parent_flow_run_id=of_it))
    except (ValueError, ObjectNotFound) as error:
        msg = f"resume_from is {FLOW_RUN}{flow_run_id}, but Prefect has no flow run {flow_run_id}"
        raise InvalidParamsError(msg) from error
    ids = {str(each.id) for each in (crashed, *inner)}
    for record in earlier:
        if record.flow_run_id in ids and list_manifests(own, record.run_id):
            return ResumePoint(own, record.run_id)
    began_from = (crashed.parameters.get("params") or {}).get("resume_from")
    return None if began_from is None else _chosen(began_from, own, earlier, params)


def _warn_of(record: RunRecord, flow_run: FlowRun, own: Storage) -> None:
    """Say that a run is passed over, in case its process was killed; not of a task next to this."""
    if flow_run.id != get_flow_run_id() and list_manifests(own, record.run_id):
        get_run_logger().warning(
            "resume_from='latest' passes over run %s, which has a checkpoint: %s, or start again "
            "with resume_from=%r",
            *(record.run_id, how_to_close(flow_run), record.run_id),
        )


def how_to_close(flow_run: FlowRun) -> str:
    """Return what state a flow run is in, and how it ends if nobody is there to end it."""
    state = f"its flow run {flow_run.id} is {flow_run.state_name} in Prefect"
    # The commands find the local server by themselves, Prefect's doesn't.
    local = local_api()
    at = f"PREFECT_API_URL={local} " if PREFECT_API_URL.value() == local else ""
    over = "If its process was killed, and its ranks have ended"
    return f"{state}. {over}, run `{at}{CLOSE % flow_run.id}`"


def continues_in(record: RunRecord) -> FlowRun | None:
    """Return the flow run, this very one or another, in which a run continues; None if it's over.

    That is also one which was suspended: its record says cancelled, as the training did stop. Or
    one whose task, or whole flow, failed and waits for a retry. Or one that has trained and is
    still evaluated. What failed in this very flow run, or was cancelled in it, is over: it was
    resumed or retried, and its tasks have new ids.
    """
    if record.is_finished or record.flow_run_id is None:
        return None
    if record.state != "training" and record.flow_run_id == str(get_flow_run_id()):
        return None
    with get_client(sync_client=True) as client, suppress(ObjectNotFound):
        flow_run = client.read_flow_run(UUID(record.flow_run_id))
        return flow_run if continues(record, flow_run) else None
    return None


def continues(record: RunRecord, flow_run: FlowRun) -> bool:
    """Whether a run continues, as far as its record and its flow run tell.

    Also one that is cancelled: its flow may notice that only at the end of a task that trains.
    """
    state = flow_run.state
    if state is None or state.is_final():
        return False
    # A flow may continue after one of its tasks has failed for good.
    return record.state != "failed" or record.is_tried_again or state.is_scheduled()


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
