"""What silence and failures of ranks mean: a hang, what stacks prove, the root cause.

Heartbeats, stacks and failures come in, and an error or nothing comes out. Nothing here asks a
rank, waits, or ends one: the supervisor does.
"""
