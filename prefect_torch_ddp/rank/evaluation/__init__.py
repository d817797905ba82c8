"""Meters: what a workload's `evaluate` measures, exact over all ranks.

Each rank counts its own share, however large; only `report` communicates. A meter returns a
`Report` of small values, the same on every rank.
"""
