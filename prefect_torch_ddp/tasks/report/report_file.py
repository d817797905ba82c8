"""The report in a run's storage: one HTML file, written when the run ends."""

import threading
from dataclasses import replace
from typing import Self

from prefect_torch_ddp.records.run_record import RunRecord
from prefect_torch_ddp.storage.protocol import Storage
from prefect_torch_ddp.tasks.report.page.document import render_document
from prefect_torch_ddp.tasks.report.page.headline import RunView, resume_line
from prefect_torch_ddp.tasks.report.page.links import Links, report_key, runs_key
from prefect_torch_ddp.tasks.report.page.run_list import render_runs
from prefect_torch_ddp.tasks.report.page.sections import render_page

TIMEOUT_S = 10.0
"""How long the end of a run waits for a storage that doesn't take its report."""


def last_lines(record: RunRecord, links: Links, report_uri: str) -> list[str]:
    """Say how to continue, and where what is shown is; the report comes last.

    Args:
        record: of the run, which has ended.
        links: with Prefect's UI.
        report_uri: empty if it wasn't written.
    """
    is_open = record.state != "completed" and record.continues_from is not None
    url = links.in_ui(record)
    lines = [f"to continue: {resume_line(record)}"] if is_open else []
    lines += [f"the run in Prefect: {url}"] if url else []
    return lines + ([f"the report: {report_uri}"] if report_uri else [])


class ReportFile:
    """Writes a run's report and the list of its experiment's runs.

    In its own thread: a storage that hangs holds up nobody for longer than `TIMEOUT_S`.
    """

    def __init__(self, storage: Storage, view: RunView) -> None:
        """Make it, without anything written yet.

        Args:
            storage: of the run.
            view: what the page shows.
        """
        self._root = f"{storage.uri.rstrip('/')}/"
        self._key = report_key(view.record.run_id)
        self.uri = f"{self._root}{self._key}"
        self._storage, self._view = storage, view
        self._is_written = False
        self._is_given_up = False
        """A newer report may be written from now on: this one begins no further page."""
        self._trouble = f"the storage hasn't taken it for {TIMEOUT_S:.0f} s"
        self._thread = threading.Thread(target=self._write, name="report-file", daemon=True)

    def start(self) -> Self:
        """Begin to write."""
        self._thread.start()
        return self

    def join(self) -> str:
        """Wait until it is written; return what went wrong, or nothing."""
        self._thread.join(TIMEOUT_S)
        self._is_given_up = not self._is_written
        return "" if self._is_written else self._trouble

    def _write(self) -> None:
        try:
            record, ui_url = self._view.record, self._view.links.ui_url
            view = replace(self._view, links=Links(ui_url, self._root, self._key))
            title = f"{record.experiment}: {view.training.status}"
            self._put(self._key, render_page(view), title)
            key = runs_key(record)
            runs = render_runs([record, *view.earlier], Links(ui_url, self._root, key))
            self._put(key, runs, record.experiment)
            self._is_written = True
        except Exception as error:  # noqa: BLE001 - the run ends well whatever happens here
            self._trouble = f"{type(error).__name__}: {error}"

    def _put(self, key: str, page: str, title: str) -> None:
        content = render_document(page, title).encode()
        if not self._is_given_up:
            self._storage.write(key, content)
