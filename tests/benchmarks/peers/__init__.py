"""What people would pick instead: the same training with each of them, undisturbed and with kills.

`python -m tests.benchmarks.peers` makes the table of docs/performance_peers.md. The scripts
`with_*.py` are users' programs: each is run by its own Python, and imports only `training`.
"""
