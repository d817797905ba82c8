"""The lean GET of small objects: the plain good answer, at a seventh of botocore's processor time.

Whatever isn't that is asked for once more by botocore, which decides and explains. The proof that
requests are signed and answers read as botocore does is in `tests/unit/storage/s3/lean`.
"""
