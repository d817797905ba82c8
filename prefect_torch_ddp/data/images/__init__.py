"""Images in folders and buckets: index, look-ahead reads, tar shards, cache.

Datasets here are map-style and know nothing of ranks; the exact order is one floor up.
"""
