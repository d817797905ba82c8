"""Owns what Python's multiprocessing leaves in the file system when a rank is killed, and its removal.

DataLoader workers share memory through sockets in a temporary folder, and spawned ones through named semaphores. Whoever
made them removes them at his exit, which a killed process has not.
"""

import contextlib
import secrets
import shutil
import tempfile
from pathlib import Path

SEMAPHORES = Path("/dev/shm")  # noqa: S108 - where Linux keeps them: sem_overview(7)


class Leftovers:
    """A place and a name for what the processes of one rank make, given to it before it makes any."""

    def __init__(self) -> None:
        """Choose them; nothing is made."""
        name = f"ddp-{secrets.token_hex(5)}"  # short: a socket's path in the folder has room for some 100 characters
        self.folder = Path(tempfile.gettempdir(), name)

    def remove(self) -> None:
        """Remove all there is; nobody uses it any more."""
        shutil.rmtree(self.folder, ignore_errors=True)
        for path in SEMAPHORES.glob(f"sem.{self.folder.name}-*"):
            with contextlib.suppress(OSError):  # another user's
                path.unlink()
