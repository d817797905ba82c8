"""Metric records: written by ranks, read by anyone."""
