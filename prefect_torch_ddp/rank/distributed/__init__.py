"""What connects a rank to its peers: process group, backend, device, network interface.

Choices are pure functions; only `group` acts on them.
"""
