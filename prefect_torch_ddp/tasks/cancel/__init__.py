"""How a cancel, Ctrl-C or SIGTERM reaches what a flow runs, and becomes Prefect's state Cancelled.

The ranks themselves stop by `gang.caller` and, after a step that they agree on, by `rank`.
"""
