"""The loop over optimizer steps: where ranks stop, what they save and restore.

How far it is, its checkpoints' numbers and what runs again on resume are an object each, which
changes only by its own methods. `reporting/` has the metrics. How gradients are combined
(`strategies/`) and how an object becomes bytes (`checkpoint/`) never come in.
"""
