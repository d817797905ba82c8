"""Where a page may lead: to Prefect's UI, and from a file in a storage to its neighbours."""

import re
from dataclasses import dataclass
from urllib.parse import quote

from prefect_torch_ddp.records.run_record import RunRecord
from prefect_torch_ddp.tasks.report.markdown import code, text

_WEB = re.compile(r"https?://([\w.:/%-]+)")


@dataclass(frozen=True)
class Links:
    """What is known of places that a page's reader can open.

    A page in Prefect's UI can't lead to a storage. A file in a storage leads to what lies near it,
    and so works in a directory, on a web server and in a copy of the storage.
    """

    ui_url: str = ""
    """Of Prefect's UI; empty if there is none."""
    root: str = ""
    """The URI of the storage that the page lies in, with a slash at its end; empty if in none."""
    key: str = ""
    """Its key there."""

    def run(self, record: RunRecord) -> str:
        """Show a run by its id, as a link to its page if there is one."""
        url = self.in_ui(record)
        if self.root:
            # It is written at the end.
            has_ended = record.state != "training"
            url = self._path(report_key(record.run_id)) if has_ended else ""
        # Prefect's UI shows the backticks of code that is a link.
        return f"[{text(record.run_id)}]({url})" if url else code(record.run_id)

    def runs(self, record: RunRecord) -> str:
        """Return the way to the list of the experiment's runs; empty from a page in the UI."""
        return self._path(runs_key(record)) if self.root else ""

    def in_ui(self, record: RunRecord) -> str:
        """Return the URL of a run's flow run in Prefect's UI; empty if that isn't known."""
        if not self.ui_url or record.flow_run_id is None:
            return ""
        return f"{self.ui_url.rstrip('/')}/runs/flow-run/{quote(record.flow_run_id, safe='')}"

    def location(self, uri: str) -> str:
        """Show a location in the storage, as a link if the page lies in it too."""
        shown = code(uri)
        if self.root and uri.startswith(self.root):
            return f"[{shown}]({self._path(uri.removeprefix(self.root))})"
        return shown

    def _path(self, key: str) -> str:
        """Return the way from the page to a key, without the part that both have in common."""
        ours, theirs = self.key.split("/"), key.split("/")
        while len(ours) > 1 and len(theirs) > 1 and ours[0] == theirs[0]:
            del ours[0], theirs[0]
        return "../" * (len(ours) - 1) + "/".join(quote(each, safe="") for each in theirs)


def web_link(url: str) -> str:
    """Show an address that others gave, as a link if a browser can follow it."""
    match = _WEB.fullmatch(url)
    return f"[{text(match[1])}]({url})" if match else code(url)


def report_key(run_id: str) -> str:
    """Return where a run's report is in its storage."""
    return f"runs/{run_id}/report.html"


def runs_key(record: RunRecord) -> str:
    """Return where the list of an experiment's last runs is in its storage."""
    return f"{record.key.rpartition('/')[0]}/runs.html"
