"""What a call is to its ranks: its pickle, its modules' paths, the libraries loaded for it."""
