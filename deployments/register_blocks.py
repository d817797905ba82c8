"""Registers an S3 bucket with Prefect, for `storage` of the parameters.

Call it again after a change: the block is replaced.

Everything comes from the environment, since other users of a machine can read a command line:

    S3_BUCKET                  the bucket (required)
    S3_FOLDER                  a prefix in it
    S3_BLOCK_NAME              the block's name, train-ddp when left out
    AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN
                               leave them out to let each machine use its own AWS credentials
    AWS_ENDPOINT_URL           of a store that isn't AWS
    AWS_REGION, AWS_DEFAULT_REGION
"""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class BucketSettings:
    """What the environment says about the bucket; its representation shows no secret."""

    bucket: str
    folder: str = ""
    block_name: str = "train-ddp"
    endpoint_url: str | None = None
    region: str | None = None
    access_key_id: str | None = field(default=None, repr=False)
    secret_access_key: str | None = field(default=None, repr=False)
    session_token: str | None = field(default=None, repr=False)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> "BucketSettings":
        """Read the settings; a variable that is empty counts as not set.

        Raises:
            ValueError: the bucket, or one half of the key pair, is missing; names the variable.
        """
        given = {name: value for name, value in environment.items() if value}
        if "S3_BUCKET" not in given:
            msg = "set S3_BUCKET to the name of the bucket"
            raise ValueError(msg)
        pair = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
        missing = [name for name in pair if name not in given]
        if len(missing) == 1:
            way_out = "or neither to use each machine's own credentials"
            msg = f"{missing[0]} is not set: set both of {' and '.join(pair)}, {way_out}"
            raise ValueError(msg)
        return cls(
            bucket=given["S3_BUCKET"],
            folder=given.get("S3_FOLDER", ""),
            block_name=given.get("S3_BLOCK_NAME", "train-ddp"),
            endpoint_url=given.get("AWS_ENDPOINT_URL"),
            region=given.get("AWS_REGION") or given.get("AWS_DEFAULT_REGION"),
            access_key_id=given.get("AWS_ACCESS_KEY_ID"),
            secret_access_key=given.get("AWS_SECRET_ACCESS_KEY"),
            session_token=given.get("AWS_SESSION_TOKEN"),
        )


def register(settings: BucketSettings) -> str:
    """Create or replace credentials and bucket block; return how parameters refer to it."""
    # prefect_aws takes seconds to import: a missing variable should be reported at once.
    from prefect_aws import AwsClientParameters, AwsCredentials, S3Bucket  # noqa: PLC0415

    credentials = AwsCredentials(
        aws_access_key_id=settings.access_key_id,
        aws_secret_access_key=settings.secret_access_key,
        aws_session_token=settings.session_token,
        region_name=settings.region,
        aws_client_parameters=AwsClientParameters(endpoint_url=settings.endpoint_url),
    )
    # A block of its own, so that new keys can be set in the UI without touching the bucket.
    credentials.save(f"{settings.block_name}-credentials", overwrite=True)
    bucket = S3Bucket(
        bucket_name=settings.bucket, bucket_folder=settings.folder, credentials=credentials
    )
    bucket.save(settings.block_name, overwrite=True)
    return f"s3-bucket/{settings.block_name}"


def main() -> None:
    """Register, and say what was done."""
    try:
        settings = BucketSettings.from_environment(os.environ)
    except ValueError as error:
        sys.exit(f"nothing was registered: {error}")
    reference = register(settings)
    where = f"s3://{settings.bucket}/{settings.folder}".rstrip("/")
    if settings.endpoint_url:
        where += f" at {settings.endpoint_url}"
    whose = (
        "the keys from the environment"
        if settings.access_key_id
        else "each machine's own AWS credentials"
    )
    print(f"registered {reference}: {where}, with {whose}")
    print(f'use it as the storage of a run: params={{"storage": "{reference}"}}')


if __name__ == "__main__":
    main()
