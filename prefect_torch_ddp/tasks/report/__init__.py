"""What people see of a run: how far it is, its curves, and when the page is written.

`page/` makes text of values. Only `artifacts` and `live` call Prefect, only `stored` reads a
storage; nothing here knows ranks, gangs or torch.
"""
