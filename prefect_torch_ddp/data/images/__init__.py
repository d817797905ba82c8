"""Images in folders, buckets and tar shards: listing, index, look-ahead reads, cache.

The datasets here are map-style and know nothing of ranks: the exact order is `data.loader`'s.
What reads objects comes in by `storage.protocol`.
"""
