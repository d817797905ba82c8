"""Batch systems as real clusters have them: Slurm's own daemons, and stand-ins for PBS."""
