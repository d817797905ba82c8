"""The loop over optimizer steps, and how all ranks agree where it stops and saves.

What is written to a storage never comes here.
"""
