"""The lean GET of small objects, for plain successes, at a seventh of botocore's processor time.

botocore repeats any other request, and its answer counts. The tests that compare signatures and
answers with botocore's are in `tests/unit/storage/s3/lean`.
"""
