"""Which sample goes to which rank, in which order."""
