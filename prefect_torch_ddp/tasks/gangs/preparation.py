"""The page of a run while Dask computes its dataset; the training then takes it over."""

import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Self

from prefect.logging import get_run_logger
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings
from prefect.utilities.context import get_task_and_flow_run_ids

from prefect_torch_ddp.records.hiding import without_credentials
from prefect_torch_ddp.tasks.report.artifacts import ArtifactWriter, artifact_client, key
from prefect_torch_ddp.tasks.report.markdown import code, text
from prefect_torch_ddp.tasks.watch.terminal import Teller

if TYPE_CHECKING:
    import logging


def stopped_line(line: str, error: BaseException) -> str:
    """Say how far a preparation was when an error stopped it; without credentials in the error."""
    return f"{line}; stopped by {type(error).__name__}: {without_credentials(str(error))}"


class PreparationPage:
    """Shows how far a preparation is: to the flow, and by the artifacts of the training's report.

    Made in a task, used as a context manager. An API that doesn't answer is only a warning.
    """

    def __init__(
        self,
        experiment: str,
        run_id: str,
        *,
        per_task: bool = False,
        interval_s: float = 5.0,
    ) -> None:
        """Make it, without anything shown yet.

        Args:
            experiment: of the run.
            run_id: of the run.
            per_task: as the training's report, each task run has its own artifacts.
            interval_s: between two updates.
        """
        self._experiment, self._run_id, self._interval_s = experiment, run_id, interval_s
        self._teller, self._per_task = Teller(), per_task
        self._logger: logging.Logger | logging.LoggerAdapter[Any] = get_run_logger()
        self._stack = ExitStack()
        self._writer: ArtifactWriter | None = None
        self._next_s = 0.0
        self._has_warned = False
        self._newest = "", 0.0

    def __enter__(self) -> Self:
        return self

    def show(self, line: str, percent: float) -> None:
        """Take in how far it is; written if that is due."""
        self._teller.show(line, percent)
        self._newest = line, percent
        if time.monotonic() >= self._next_s:
            self._write(line, percent)
            self._next_s = time.monotonic() + self._interval_s

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> None:
        with self._stack:
            line, percent = self._newest
            if line and error is not None:
                self._write(stopped_line(line, error), percent)

    def _write(self, line: str, percent: float) -> None:
        try:
            # Prefect's own retries last a minute; ours come at the interval.
            with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}):
                if self._writer is None:
                    client = self._stack.enter_context(artifact_client())
                    ids = get_task_and_flow_run_ids()
                    self._writer = ArtifactWriter(client, *ids, per_task=self._per_task)
                page = f"# Preparing the data of {code(self._run_id)}\n\n{text(line)}\n"
                name = self._experiment
                self._writer.put("progress", key("progress", name), percent, text(line))
                self._writer.put("markdown", key("report", name), page, text(line))
        except Exception as error:  # noqa: BLE001 - the preparation continues whatever happens here
            if not self._has_warned:
                self._has_warned = True
                self._logger.warning("the page of the preparation can't be written: %r", error)
