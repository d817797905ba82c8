"""The watch over what a task stands on: cancels, lost workers and schedulers, killed flows.

What a gang watches itself (ranks, their hosts) is in `gang`.
"""
