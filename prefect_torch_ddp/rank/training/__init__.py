"""The loop over optimizer steps: where ranks stop, what they save, restore and report.

Tracked objects, their checkpoints and the reported metrics come in here. How gradients are
combined (`strategies/`) and how an object becomes bytes (`checkpoint/`) never do.
"""
