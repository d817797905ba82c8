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

PAIR = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")


def register(given: Mapping[str, str]) -> str:
    """Create or replace credentials and bucket block; return how parameters refer to it."""
    # prefect_aws takes seconds to import: a missing variable should be reported at once.
    from prefect_aws import AwsClientParameters, AwsCredentials, S3Bucket  # noqa: PLC0415

    name = given.get("S3_BLOCK_NAME", "train-ddp")
    credentials = AwsCredentials(
        aws_access_key_id=given.get("AWS_ACCESS_KEY_ID"),
        aws_secret_access_key=given.get("AWS_SECRET_ACCESS_KEY"),
        aws_session_token=given.get("AWS_SESSION_TOKEN"),
        region_name=given.get("AWS_REGION") or given.get("AWS_DEFAULT_REGION"),
        aws_client_parameters=AwsClientParameters(endpoint_url=given.get("AWS_ENDPOINT_URL")),
    )
    # A block of its own, so that new keys can be set in the UI without touching the bucket.
    credentials.save(f"{name}-credentials", overwrite=True)
    bucket = S3Bucket(
        bucket_name=given["S3_BUCKET"],
        bucket_folder=given.get("S3_FOLDER", ""),
        credentials=credentials,
    )
    bucket.save(name, overwrite=True)
    return f"s3-bucket/{name}"


def main() -> None:
    """Register, and say what was done."""
    given = {name: value for name, value in os.environ.items() if value}  # empty is not set
    if "S3_BUCKET" not in given:
        sys.exit("nothing was registered: set S3_BUCKET to the name of the bucket")
    missing = [name for name in PAIR if name not in given]
    if len(missing) == 1:
        sys.exit(
            f"nothing was registered: {missing[0]} is not set: set both of {' and '.join(PAIR)}, "
            "or neither to use each machine's own credentials"
        )
    reference = register(given)
    where = f"s3://{given['S3_BUCKET']}/{given.get('S3_FOLDER', '')}".rstrip("/")
    if endpoint_url := given.get("AWS_ENDPOINT_URL"):
        where += f" at {endpoint_url}"
    whose = "each machine's own AWS credentials" if missing else "the keys from the environment"
    print(f"registered {reference}: {where}, with {whose}")
    print(f'use it as the storage of a run: params={{"storage": "{reference}"}}')


if __name__ == "__main__":
    main()
