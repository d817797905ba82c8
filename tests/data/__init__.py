"""What released versions stored, kept for ever, and its workload; and a file of DuckDB."""
