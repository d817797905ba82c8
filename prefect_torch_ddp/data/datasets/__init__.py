"""Prepared datasets in a storage: their manifest, how they are published, how they are read."""
