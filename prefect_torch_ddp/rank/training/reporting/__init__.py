"""What a rank reports of its training: metrics, ledger, times, and the progress that people see.

It reads how far the loops and the checkpoints are, and never moves them.
"""
