"""How gradients become those of the global batch: share weights, micro-batches, elastic ranks.

A strategy also says which shards of the state a rank saves. What reads or writes them never comes
here.
"""
