"""A storage below a prefix of an S3 bucket, on botocore, which boto3 stands on.

All modules here take a `location`; other folders use `storage`. S3's own answers never leave
this folder: callers see the protocols of `storage.protocol` and the errors of `errors`.
"""
