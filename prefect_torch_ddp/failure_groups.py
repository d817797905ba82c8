"""Owns which failures of ranks say the same, and how several ranks are named. Pure."""

from collections.abc import Sequence

from prefect_torch_ddp.messages import RankFailure


def groups_of_equals(failures: Sequence[RankFailure]) -> list[list[RankFailure]]:
    """Put failures together that say the same; in the order in which each was seen first."""
    groups: dict[tuple[str, str, bool], list[RankFailure]] = {}
    for failure in failures:
        groups.setdefault((failure.kind, failure.summary, failure.is_collateral), []).append(failure)
    return list(groups.values())


def split_equal(cause: RankFailure, others: Sequence[RankFailure]) -> tuple[list[RankFailure], list[RankFailure]]:
    """Part the other ranks' failures into those that say the same as the cause and the rest."""
    together = next(group for group in groups_of_equals([cause, *others]) if group[0] is cause)
    return together[1:], [failure for failure in others if all(failure is not one for one in together)]


def name_ranks(failures: Sequence[RankFailure]) -> str:
    """Name ranks with their hosts: `rank 1 on b`, or `ranks 0, 1 on a, 2 on b`."""
    by_host: dict[str, list[int]] = {}
    for failure in sorted(failures, key=lambda failure: failure.rank):
        by_host.setdefault(failure.host, []).append(failure.rank)
    places = ", ".join(f"{', '.join(map(str, ranks))} on {host}" for host, ranks in by_host.items())
    return f"{'rank' if len(failures) == 1 else 'ranks'} {places}"
