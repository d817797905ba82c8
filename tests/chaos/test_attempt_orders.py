"""Attempts of one run race as in the integration test of that name, in many more orders."""

import os
from pathlib import Path

import pytest

from tests.support.attempt_orders import Order

pytestmark = pytest.mark.timeout(1800)
FIRST, NUM = int(os.environ.get("PTD_FIRST_ORDER", "1000")), 50


@pytest.mark.parametrize("first", range(FIRST, FIRST + 40 * NUM, NUM))
def test_in_random_orders(first: int, tmp_path: Path) -> None:
    """2,000 orders lose nothing; PTD_FIRST_ORDER=5000 selects others."""
    wrong = {
        seed: problems
        for seed in range(first, first + NUM)
        if (problems := Order(tmp_path / str(seed), seed).run())
    }
    assert not wrong
