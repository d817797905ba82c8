"""What a training keeps: how far it is, its records and its checkpoints.

The steps themselves and gradients never come here.
"""
