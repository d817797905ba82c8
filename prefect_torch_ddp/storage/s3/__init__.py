"""A storage below a prefix of an S3 bucket, on botocore, which boto3 stands on.

`location` is what all modules here take; `storage` is what others use. What S3 says never leaves
this folder: callers see the protocols of `storage.protocol` and the errors of `errors`.
"""
