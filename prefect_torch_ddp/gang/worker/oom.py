"""Owns the question whether the kernel killed a rank for want of memory: what its counters and
its log say.
"""

import contextlib
import os
import re
import time
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
KERNEL_LOG = Path("/dev/kmsg")
CLOCK_SLACK_S = 5.0
"""The kernel's log has a clock of its own, which may be a little apart from the monotonic
one."""
MAX_RECORD_BYTES = 8192

_KILLED = re.compile(
    r"Killed process (?P<pid>\d+) \((?P<name>.*?)\).*?anon-rss:(?P<anon>\d+)kB", re.DOTALL
)


class OomWatch:
    """Remembers the kernel's count of kills in this process's control group, to tell later
    whether there were more.
    """

    def __init__(
        self,
        cgroups: Path = CGROUPS,
        kernel_log: Path = KERNEL_LOG,
        membership: Path = Path("/proc/self/cgroup"),
    ) -> None:
        """Read the count as it is now; a system that keeps none is no error."""
        self._counter = _counter_file(cgroups, membership)
        self._kernel_log = kernel_log
        self._before = self._count()
        self._began_s = time.monotonic()

    def report(self, pid: int) -> str | None:
        """Say what the kernel reports of a process that SIGKILL ended; None where it reports
        nothing, or can't be asked.
        """
        # A container has process numbers of its own: there the log speaks of others, and the
        # counter alone is left.
        said = find_kill(_read_log(self._kernel_log), pid, self._began_s - CLOCK_SLACK_S)
        if said is not None:
            return f"the kernel's OOM killer reports: {said}"
        now = self._count()
        if now is None or self._before is None or now <= self._before:
            return None
        killed = now - self._before
        return (
            f"the kernel's OOM killer reports {killed} kill{'s' if killed > 1 else ''} for want of memory among the processes "
            "of this Dask worker's control group since the rank started"
        )

    def _count(self) -> int | None:
        if self._counter is None:
            return None
        try:
            return count_of_kills(self._counter.read_text(encoding="ascii"))
        except OSError:
            return None


def memory_group(membership: str) -> tuple[str, str] | None:
    """Return the folder below the cgroups' mount and the file that count this process's kills.

    Args:
        membership: the text of /proc/<pid>/cgroup.
    """
    groups = [line.split(":", 2) for line in membership.splitlines() if line.count(":") >= 2]  # noqa: PLR2004 - number:controllers:path
    for _, controllers, path in groups:
        if "memory" in controllers.split(","):  # version 1
            return f"memory/{path.strip('/')}", "memory.oom_control"
    for number, controllers, path in groups:
        if number == "0" and not controllers:  # version 2
            return path.strip("/"), "memory.events"
    return None


def count_of_kills(text: str) -> int | None:
    """Return the count in a memory.events or memory.oom_control file; None where this kernel
    keeps none.
    """
    match = re.search(r"^oom_kill (\d+)$", text, re.MULTILINE)
    return int(match[1]) if match else None


def find_kill(log: str, pid: int, since_s: float) -> str | None:
    """Return what the kernel's log says of the newest kill of a process, for people.

    Args:
        log: records as /dev/kmsg gives them: `level,number,microseconds,flags;text`.
        pid: of the process.
        since_s: seconds on the log's clock before which records are of another process with
            that number.
    """
    for record in reversed(log.splitlines()):
        head, _, text = record.partition(";")
        match = _KILLED.search(text)
        fields = head.split(",")
        if match is None or int(match["pid"]) != pid or len(fields) < 3 or not fields[2].isdigit():  # noqa: PLR2004
            continue
        if int(fields[2]) / 1e6 >= since_s:
            where = (
                "in its control group, at the group's limit"
                if "emory cgroup out of memory" in text
                else "of the whole machine"
            )
            return f"out of memory {where}: killed process {pid} ({match['name']}), which held {int(match['anon']) // 1024} MiB"
    return None


def _counter_file(cgroups: Path, membership: Path) -> Path | None:
    try:
        group = memory_group(membership.read_text(encoding="ascii", errors="replace"))
    except OSError:
        return None
    if group is None:
        return None
    folder, name = group
    # In a container whose path is the host's, the mount itself is the container's group.
    candidates = (
        cgroups / folder / name,
        cgroups / folder.partition("/")[0] / name,
        cgroups / name,
    )
    return next((path for path in candidates if path.is_file()), None)


def _read_log(path: Path) -> str:
    """Return the kernel's log, as far as this process may read it."""
    records: list[bytes] = []
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            while True:
                try:
                    record = os.read(fd, MAX_RECORD_BYTES)
                except BlockingIOError:
                    break
                except BrokenPipeError:  # it was overwritten while we read: go on with the next
                    continue
                if not record:
                    break
                records.append(record)
        finally:
            os.close(fd)
    return b"".join(records).decode(errors="replace")
