"""What people see of a run: the live report, the final one, their curves, the run record.

Text and pictures are made by pure functions of values. Only `artifacts` and `live` talk to
Prefect; nothing here knows ranks, gangs or torch.
"""
