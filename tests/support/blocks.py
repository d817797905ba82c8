"""Blocks on the Prefect server, saved as a person does in its UI."""

from typing import Any

from prefect_aws import AwsClientParameters, AwsCredentials, S3Bucket

from tests.support.s3_server import S3Server

FOLDER = "team/models"


def save_block(
    name: str, server: S3Server, user: str = "owner", folder: str = FOLDER, **credentials: Any
) -> str:
    """Save an s3-bucket block with a user's keys, or the given ones; return its reference."""
    key, secret = server.keys[user]
    given = {
        "aws_access_key_id": key,
        "aws_secret_access_key": secret,
        "region_name": "us-east-1",
        "aws_client_parameters": AwsClientParameters(endpoint_url=server.endpoint_url),
    }
    made = AwsCredentials(**given | credentials)
    block = S3Bucket(bucket_name=server.bucket, bucket_folder=folder, credentials=made)
    block.save(name, overwrite=True)
    return f"s3-bucket/{name}"
