"""All calls of a `ddp_task` in a flow run: found, compared, and shown on one page.

Nothing here trains or changes a run; pages of single runs are in `tasks.report`.
"""
