"""Images in folders and buckets: listing, index, look-ahead reads, cache.

The datasets here are map-style and know nothing of ranks: `data.loader` gives the exact order.
They read objects through `storage.protocol`.
"""
