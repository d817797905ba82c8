"""What a training leaves for later: its record in the storage, and its events on Prefect's bus.

In comes what the gang's caller learns while it trains. Nothing here may hurt or slow a training.
"""
