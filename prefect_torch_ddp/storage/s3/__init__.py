"""A storage below a prefix of an S3 bucket, on boto3.

What S3 says never leaves this folder: callers see the seam of `storage.protocol` and the errors
of `errors`.
"""
