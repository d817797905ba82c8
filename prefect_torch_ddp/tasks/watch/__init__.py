"""The watch over what a flow's tasks stand on: cancels, lost workers and schedulers, killed flows.

It turns each into a state of Prefect's. What a gang watches itself (ranks, their hosts) is never
here, but in `gang`.
"""
