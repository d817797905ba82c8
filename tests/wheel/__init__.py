"""The wheel with the lowest and the newest versions of what it requires; `make wheel` runs them."""
