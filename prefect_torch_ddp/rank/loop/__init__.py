"""The loop over optimizer steps: where it resumes, and how all ranks agree on what happens at a
step's end.

No collective is ever made here.
"""
