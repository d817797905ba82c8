"""S3ImageFolder on a real server ignores other objects next to the images."""

import pytest

from prefect_torch_ddp import NoImagesError
from prefect_torch_ddp.data import S3ImageFolder
from prefect_torch_ddp.storage.s3.client import client_of
from tests.integration.data.image_files import image_files


@pytest.mark.parametrize("num", [4, pytest.param(1100, marks=pytest.mark.extended)])
def test_markers_many_objects_and_a_neighbour_of_the_same_beginning(s3_server, num):
    """1,100 objects take two pages, `train2` isn't `train`, and folder markers count as nothing."""
    storage = s3_server.storage()
    client, (data,) = client_of(storage), image_files(1).values()
    names = [f"train/c{i % 2}/{i:05}.png" for i in range(num)]
    for name in (*names, "train2/c9/0.png", "train/c0/", "train/", "train.png"):
        body = b"" if name.endswith("/") else data
        client.put_object(Bucket=storage.bucket, Key=storage.name_of(name), Body=body)
    dataset = S3ImageFolder("train", storage=storage)
    assert dataset.classes == ["c0", "c1"]
    assert len(dataset) == num
    assert S3ImageFolder(f"{storage.uri}/train", storage=storage).samples == dataset.samples
    with pytest.raises(
        NoImagesError, match=rf"any class folder in {storage.uri}/train3: there is nothing"
    ):
        S3ImageFolder("train3", storage=storage)
