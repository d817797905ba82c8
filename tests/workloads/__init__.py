"""The functions that tests run on ranks."""
