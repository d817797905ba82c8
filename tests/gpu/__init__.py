"""Tests that need a CUDA device; elsewhere each is skipped and says why."""
