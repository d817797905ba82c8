"""Owns the functions that tests run on ranks."""
