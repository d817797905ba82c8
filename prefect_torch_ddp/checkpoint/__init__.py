"""Checkpoints that are whole or absent."""
