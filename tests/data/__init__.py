"""What released versions stored, kept for ever, and the workload that made it."""
