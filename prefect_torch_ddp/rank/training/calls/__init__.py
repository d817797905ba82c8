"""What a call of `ctx.steps` goes through: a loader of ours, a loader of others, a number.

Also whether all ranks make the same call. What happens at a step's end never comes here.
"""
