"""How a person calls what we make: our flows, and tasks of a function."""
