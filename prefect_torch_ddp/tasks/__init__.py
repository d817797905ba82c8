"""Prefect tasks: what a flow run shows and retries."""
