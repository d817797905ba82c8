"""Stored files of released versions, kept for ever, and what made them."""
