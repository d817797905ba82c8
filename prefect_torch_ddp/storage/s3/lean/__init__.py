"""The lean GET of small objects: signed and read as botocore does, at a seventh of its
processor time.

It reads whole objects and ranges, nothing else.
"""
