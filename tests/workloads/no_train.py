"""A workload that lacks `train`."""


def prepare(rank: object) -> None:
    """Do nothing."""


def evaluate(rank: object) -> None:
    """Do nothing."""
