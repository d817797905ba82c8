"""The example workloads run end to end on small data in the real formats, from a directory and from
S3."""

import hashlib
import json
from pathlib import Path

import pytest

from flows import pet_names
from prefect_torch_ddp import (
    CheckpointParams,
    ClusterParams,
    TrainParams,
    read_metrics,
    read_result,
    train_flow,
)
from prefect_torch_ddp.checkpoint.manifest import list_manifests
from prefect_torch_ddp.storage.directory import DirectoryStorage
from tests.integration.data.image_files import write_cifar10, write_images
from tests.support.blocks import save_block
from tests.support.runs import flow_run_id_of, report_of
from tests.support.s3_server import S3Server

pytestmark = [
    pytest.mark.extended,
    pytest.mark.timeout(400),
    pytest.mark.usefixtures("prefect_api"),
]


def some_names() -> list[str]:
    """Return 240 names like those of pets."""
    begins = ("Bu", "Mo", "Lu", "Ze", "Ri", "Pi", "Sa", "Kü", "No", "Ta")
    middles, ends = ("l", "nn", "xi", "tt", "b", "s"), ("a", "y", "o", "us")
    return [f"{begin}{middle}{end}" for begin in begins for middle in middles for end in ends]


def test_pet_names(s3_server: S3Server, shared: ClusterParams, tmp_path: Path) -> None:
    """An LSTM learns from a text file on S3, and makes 50 names that the file doesn't have."""
    source = s3_server.storage("pets")
    names = some_names()
    source.write("pets.txt", "\r\n".join(["", *names, names[0].upper(), "  "]).encode("utf-8-sig"))
    report = train_flow(
        TrainParams(
            workload="flows.pet_names",
            storage=str(tmp_path),
            source=save_block("pets", s3_server, folder="pets"),
            cluster=shared,
            data_options={"file": "pets.txt"},
            options={"epochs": 10, "hidden": 32, "lr": 0.02},
        )
    )
    new = read_result(tmp_path, report.run_id, "new_names.txt").decode().splitlines()
    found = {name.casefold() for name in new}
    assert len(new) == len(found) == 50 == report.evaluation.metrics["new_names"]
    assert not found & {name.casefold() for name in names}
    assert report.evaluation.texts == {"New names": ", ".join(new)}
    assert f"> {new[0]}, {new[1]}, " in report_of(flow_run_id_of(report.flow_run_url))
    assert report.training.value["num_names"] == 216
    assert report.training.value["num_dropped"] == 3, "two blank lines, and one name again"
    assert report.model_uri is not None
    made = pet_names.names_of(report.model_uri, num=20)  # of the exported model, and nothing else
    assert len(made) == 20
    assert made == pet_names.names_of(report.model_uri, num=20)
    assert set("".join(made)) <= set("".join(names))
    assert report.epochs[-1].metrics["loss"] < 0.8 * report.epochs[0].metrics["loss"]
    assert report.evaluation.loss is not None


@pytest.mark.more
def test_cifar10_resumes_in_the_midst_of_an_epoch(shared: ClusterParams, tmp_path: Path) -> None:
    """vgg11_bn resumes from its checkpoint after a kill, with validation after each epoch."""
    write_cifar10(tmp_path / "cifar-10-batches-bin", 10)
    report = train_flow(
        TrainParams(
            workload="tests.workloads.data:KilledCifar10",
            storage=str(tmp_path / "store"),
            source=str(tmp_path / "cifar-10-batches-bin"),
            options={"epochs": 2, "global_batch_size": 15},
            checkpoint=CheckpointParams(every_steps=4, every_s=None),
            cluster=shared,
        )
    )
    training = report.training
    assert (training.attempt, training.num_steps, training.num_epochs) == (2, 6, 2)
    assert report.training.resumed_from_step == 4
    assert [row.num_samples for row in report.epochs] == [45, 45]
    for row in report.epochs:
        assert {"loss", "lr", "validation_accuracy", "validation_loss"} <= row.metrics.keys()
    assert report.evaluation.num_samples == 10
    assert [score.name for score in report.evaluation.classes][:2] == ["airplane", "automobile"]
    frame = read_metrics(tmp_path / "store", report.run_id)
    assert sorted(zip(frame["step"], frame["rank"], strict=True)) == [
        (step, rank) for step in range(1, 7) for rank in range(2)
    ]


@pytest.mark.long
def test_cifar10_for_three_epochs_and_three_more(shared: ClusterParams, tmp_path: Path) -> None:
    """vgg11_bn that is resumed after an epoch has the bits of a run without interruption."""
    write_cifar10(tmp_path / "cifar-10-batches-bin", 10)
    options = {"schedule": "constant", "global_batch_size": 15}

    def weights(folder: str, epochs: int, **chosen: str) -> str:
        report = train_flow(
            TrainParams(
                workload="flows.cifar10",
                storage=str(tmp_path / folder),
                source=str(tmp_path / "cifar-10-batches-bin"),
                options={**options, "epochs": epochs},
                checkpoint=CheckpointParams(every_epochs=1, every_s=None),
                cluster=shared,
                **chosen,
            )
        )
        assert report.training.num_epochs == epochs
        assert report.model_uri is not None
        return hashlib.sha256(Path(report.model_uri).read_bytes()).hexdigest()

    undisturbed = weights("at once", 6)
    assert weights("in two", 3) != undisturbed
    assert weights("in two", 6, resume_from="latest") == undisturbed


@pytest.mark.more
def test_land_use_as_its_page_has_it(shared: ClusterParams, tmp_path: Path) -> None:
    """resnet101 at 64x64 pixels trains by SGD with momentum; each epoch has a checkpoint, and the
    model's card its classes."""
    write_images(DirectoryStorage(tmp_path / "land"), ["field", "forest"], num_each=5)
    report = train_flow(
        TrainParams(
            workload="flows.land_use",
            storage=str(tmp_path / "store"),
            source=str(tmp_path / "land"),
            options={"size": 64, "model": "resnet101", "optimizer": "sgd", "epochs": 2},
            checkpoint=CheckpointParams(every_epochs=1, every_s=None),
            cluster=shared,
        )
    )
    storage = DirectoryStorage(tmp_path / "store")
    assert [each.epoch for each in list_manifests(storage, report.run_id)] == [1, 2]
    assert report.model_uri is not None
    card = json.loads(Path(report.model_uri).with_suffix(".json").read_text())
    assert json.loads(card["value"]["classes"]) == ["field", "forest"]
    assert json.loads(card["value"]["mean"]) == [0.485, 0.456, 0.406]


@pytest.mark.long
def test_land_use(s3_server: S3Server, shared: ClusterParams, tmp_path: Path) -> None:
    """21 classes of images on S3 train compiled, in bfloat16 and micro-batches, with a report."""
    how = {"global_batch_size": 28, "micro_batch_size": 7}
    how |= {"precision": "bfloat16", "compile": "eager"}
    source = s3_server.storage("land")
    write_images(source, [f"class{number:02}" for number in range(21)], num_each=5)
    report = train_flow(
        TrainParams(
            workload="flows.land_use",
            storage=str(tmp_path),
            source=save_block("land", s3_server, folder="land"),
            options={"size": 64, "model": "squeezenet1_1", "epochs": 1} | how,
            cluster=shared,
        )
    )
    assert (report.training.num_steps, report.training.value["num_classes"]) == (3, 21)
    assert report.evaluation.num_samples == 21 == sum(map(sum, report.evaluation.confusion_matrix))
    assert [score.support for score in report.evaluation.classes] == [1] * 21
    page = report_of(flow_run_id_of(report.flow_run_url))
    assert "| class20 |" in page
