"""What people see of a run: the live report, the final one, their curves.

Pure functions make text and pictures from values. Only `artifacts` and `live` call Prefect;
nothing here knows ranks, gangs or torch.
"""
