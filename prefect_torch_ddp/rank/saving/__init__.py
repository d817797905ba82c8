"""What a training keeps: its progress, its records and its checkpoints.

The steps themselves and gradients never come here.
"""
