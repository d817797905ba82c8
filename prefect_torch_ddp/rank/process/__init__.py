"""The process of a rank: how it starts, fresh or forked, what it logs, and how it ends.

It runs any function or script: nothing here knows a RankContext, checkpoints or steps, though the
fork server loads their modules ahead.
"""
