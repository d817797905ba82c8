"""Inside a rank process: the process group, the user's function and its context."""
