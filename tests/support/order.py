"""The order of tests: those that may take longest come first, dealt out to all processes."""

import os

import pytest


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order those that are left once `-m` and `-k` have chosen.

    `--dist worksteal` gives each process a contiguous part. Each begins with its share of the long
    tests that have a limit of their own, so that no process waits for another's last test, and
    goes on with neighbours, which share servers and clusters.
    """
    limits_s = {item: limit_s for item in items if (limit_s := _limit_s(item))}
    longest_first = sorted(limits_s, key=lambda item: -limits_s[item])
    others = [item for item in items if item not in limits_s]
    num_parts = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    ordered: list[pytest.Item] = []
    for part in range(num_parts):
        ordered += longest_first[part::num_parts]
        num_others = max(0, len(items) * (part + 1) // num_parts - len(ordered))
        ordered += others[:num_others]
        del others[:num_others]
    items[:] = ordered


def _limit_s(item: pytest.Item) -> float:
    limit = item.get_closest_marker("timeout")
    return limit.args[0] if limit and item.get_closest_marker("long") else 0
