"""The wheel: with the lowest and newest versions, and as newcomers use it; `make wheel`."""
