"""Batch systems as they are met on real clusters: Slurm's own daemons, and PBS by stand-in
commands."""
