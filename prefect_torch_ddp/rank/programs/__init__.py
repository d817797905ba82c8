"""What a program with its own loop and checkpoints is given: a folder, and the ranks' agreement.

Nothing of `ctx.steps` and `ctx.track` comes in, which are in `training`.
"""
