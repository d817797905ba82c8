"""What a newcomer's terminal has: nothing that tests or developers set for themselves."""

import os
from pathlib import Path

_OF_ANY_TERMINAL = ("LANG", "TERM", "TMPDIR", "USER")
_OF_THE_SESSION = ("DO_NOT_TRACK", "PTD_TEST_SESSION")
"""Tests call nobody's home, and their processes can be found. Neither changes what is printed."""


def newcomers_environment(home: Path, bin_folder: Path, **changes: str) -> dict[str, str]:
    """Return the environment of somebody who has just activated an environment.

    Args:
        home: folder of the user, and of all that Prefect keeps.
        bin_folder: of the environment; comes first on PATH.
        changes: what the user has exported, for example PREFECT_API_URL.
    """
    kept = (*_OF_ANY_TERMINAL, *_OF_THE_SESSION)
    environment = {name: os.environ[name] for name in kept if name in os.environ}
    environment |= {"HOME": str(home), "PATH": f"{bin_folder}:{os.environ['PATH']}"}
    # A terminal shows each line at once; our pipe would get what is printed at the end.
    return environment | {"PYTHONUNBUFFERED": "1"} | changes
