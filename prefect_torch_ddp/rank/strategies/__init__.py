"""How gradients become those of the global batch: share weights, micro-batches, elastic ranks.

What loads or saves state never comes here.
"""
