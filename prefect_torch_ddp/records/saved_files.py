"""The files of a run's results: what `ctx.save` wrote.

Each attempt has its own, so that a late one can't replace a newer one's. So has each step that is
evaluated again.
"""

from prefect_torch_ddp.errors import InvalidParamsError, ObjectNotFoundError
from prefect_torch_ddp.storage.names import check_key
from prefect_torch_ddp.storage.protocol import Storage

_EVALUATIONS = "evaluate/step-"
"""How the folders begin of which each has the evaluations of one step's checkpoint."""


def _results_prefix(run_id: str) -> str:
    """Return where a run's results are."""
    return f"runs/{run_id}/results/"


def attempt_folder(attempt: int) -> str:
    """Return where an attempt's files are among a run's results."""
    return f"{attempt:06d}"


def evaluation_folder(step: int) -> str:
    """Return where evaluations of a step's checkpoint are, among a run's logs and its results."""
    return f"{_EVALUATIONS}{step:08d}"


def write_result(storage: Storage, run_id: str, folder: str, path: str, data: object) -> None:
    """Write a file to a folder of a run's results, such as an attempt's; see `RankContext.save`."""
    check_key(path)
    content = data.encode() if isinstance(data, str) else data
    if not isinstance(content, bytes | bytearray | memoryview):
        given = f"ctx.save({path!r}) was given a {type(data).__name__}"
        msg = f"{given}; it takes bytes or text, such as json.dumps of plain values"
        raise InvalidParamsError(msg)
    storage.write(f"{_results_prefix(run_id)}{folder}/{path}", bytes(content))


def read_result(
    storage: Storage, run_id: str, path: str, evaluated_step: int | None = None
) -> bytes:
    """Return a file as the newest attempt that saved it left it, or as `evaluate_flow` did.

    Args:
        storage: of the run.
        run_id: of the run.
        path: as it was saved.
        evaluated_step: of the checkpoint that `evaluate_flow` evaluated; None: of the run itself.

    Raises:
        BadKeyError: the path would leave the results.
        ObjectNotFoundError: nobody saved it; names those files that there are, and the steps for
            which `evaluate_flow` did.
        StorageError: it can't be read.
    """
    check_key(path)
    prefix, who = _results_prefix(run_id), f"run {run_id} saved no {path}"
    if evaluated_step is None:
        keys = _newest_files(storage, prefix)
    else:
        prefix += f"{evaluation_folder(evaluated_step)}/"
        who = f"evaluate_flow saved no {path} for step {evaluated_step} of run {run_id}"
        keys = {found.key.removeprefix(prefix): found.key for found in storage.list(prefix)}
    if path not in keys:
        there = ", ".join(sorted(keys)) or "none"
        msg = f"{who} in {storage.uri}; its files are: {there}"
        if evaluated_step is None and (steps := _steps_evaluated(storage, prefix, path)):
            msg += f"; evaluate_flow saved it: pass evaluated_step={' or '.join(map(str, steps))}"
        raise ObjectNotFoundError(msg)
    return storage.read(keys[path])


def _steps_evaluated(storage: Storage, prefix: str, path: str) -> list[int]:
    """Return the steps for which `evaluate_flow` saved a path, in their order."""
    prefix += _EVALUATIONS
    found = (each.key.removeprefix(prefix).partition("/") for each in storage.list(prefix))
    return sorted(int(step) for step, _, file in found if step.isdecimal() and file == path)


def _newest_files(storage: Storage, prefix: str) -> dict[str, str]:
    """Return the key of each path that attempts saved, of the newest attempt that did."""
    found = []
    for each in storage.list(prefix):
        attempt, _, path = each.key.removeprefix(prefix).partition("/")
        if attempt.isdecimal() and path:
            found.append((int(attempt), path, each.key))
    return {path: key for _, path, key in sorted(found)}
