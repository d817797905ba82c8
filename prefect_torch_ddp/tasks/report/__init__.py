"""What people see of a run: the live report, the final one, curves, tables, the run record.

Pure functions from values to markdown, but for the one writer of artifacts.
"""
