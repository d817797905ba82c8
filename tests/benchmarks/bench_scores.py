"""The example workloads' scores on 1 and 2 ranks, beside those of the same training in one process
by torch alone. PTD_BENCH_ROUNDS is the number of seeds."""

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from PIL import Image

from flows import cifar10, land_use, pet_names
from prefect_torch_ddp import CheckpointParams, RankContext, TrainParams, train_flow
from tests.benchmarks import score_plain
from tests.benchmarks.beside import rounds, show
from tests.support.s3_server import S3Server

pytestmark = [pytest.mark.timeout(7200), pytest.mark.usefixtures("on_cpus", "prefect_api")]
SEEDS = range(rounds(3))
AT_ITS_END = CheckpointParams(every_epochs=1, every_s=None)
SIZE, NUM_CLASSES = 64, 4


class Case(NamedTuple):
    """A training of an example workload."""

    module: Any
    plain: Callable[[RankContext], score_plain.Plain]
    options: dict[str, Any]
    checkpoint: CheckpointParams = AT_ITS_END


CASES = {
    "pet_names: 4 layers": Case(
        pet_names, score_plain.of_pet_names, {"layers": 4, "hidden": 64, "epochs": 30, "lr": 0.01}
    ),
    "cifar10: vgg11_bn": Case(cifar10, score_plain.of_cifar10, {"epochs": 4, "lr": 0.02}),
    "land_use: resnet101 at 64x64, SGD": Case(
        land_use,
        score_plain.of_land_use,
        {"size": SIZE, "model": "resnet101", "optimizer": "sgd", "lr": 0.3, "epochs": 12}
        | {"global_batch_size": 16, "weight_decay": 1e-4},
    ),
    "land_use: resnet18 with given weights, images in a bucket": Case(
        land_use,
        score_plain.of_land_use,
        {"size": SIZE, "epochs": 8, "global_batch_size": 16, "lr": 5e-4},
        CheckpointParams(every_steps=100, every_s=None),
    ),
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Path]:
    """Make what the workloads read, with classes that can't be told with certainty."""
    found = {
        module: tmp_path_factory.mktemp(module.__name__.rpartition(".")[2])
        for module in (pet_names, cifar10, land_use)
    }
    (found[pet_names] / "names.txt").write_text("\n".join(some_names(700)), encoding="utf-8")
    write_cifar10(found[cifar10], 300)
    write_images(found[land_use], NUM_CLASSES, 48)
    return found


@pytest.fixture
def environment(
    s3_server: S3Server, sources: dict[Any, Path], monkeypatch: pytest.MonkeyPatch
) -> str:
    """Have the images in a bucket too, and the keys of it; return its URI."""
    for name, value in s3_server.environment().items():
        monkeypatch.setenv(name, value)
    bucket = s3_server.storage("land")
    for image in sources[land_use].glob("*/*"):
        bucket.write(f"{image.parent.name}/{image.name}", image.read_bytes())
    return bucket.uri


@pytest.mark.parametrize("name", CASES)
def test_scores(name: str, sources: dict[Any, Path], environment: str, tmp_path: Path) -> None:
    """Print the accuracies on held-out samples."""
    case = CASES[name]
    source, options = str(sources[case.module]), dict(case.options)
    if "given weights" in name:
        source = environment
        options["weights"] = pretrained(sources[land_use], options, tmp_path / "first")
    found: dict[str, list[float]] = {}
    for seed in SEEDS:
        data = tmp_path / f"data-{seed}"
        data.mkdir()
        with RankContext.local(data, options, seed, tmp_path / "plain", source=source) as ctx:
            case.module.prepare(ctx)
            found.setdefault("one process", []).append(case.plain(ctx).fit())
        for world_size in (1, 2):
            report = train_flow(
                TrainParams(
                    workload=case.module.__name__,
                    storage=str(tmp_path / "store"),
                    source=source,
                    world_size=world_size,
                    seed=seed,
                    options=options,
                    checkpoint=case.checkpoint,
                )
            )
            assert report.evaluation is not None
            assert report.evaluation.accuracy is not None
            found.setdefault(f"{world_size} ranks", []).append(report.evaluation.accuracy)
    cells = [
        f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"
        for values in found.values()
    ]
    show("training | one process | world size 1 | world size 2", [[name, *cells]])


def pretrained(images: Path, options: dict[str, Any], storage: Path) -> str:
    """Train the net on half of the classes; return the exported weights."""
    some = storage / "some"
    some.mkdir(parents=True)
    for folder in sorted(images.iterdir())[: NUM_CLASSES // 2]:
        (some / folder.name).symlink_to(folder)
    report = train_flow(
        TrainParams(
            workload="flows.land_use",
            storage=str(storage / "store"),
            source=str(some),
            options=options,
            checkpoint=AT_ITS_END,
        )
    )
    assert report.model_uri is not None
    return report.model_uri


def some_names(num: int) -> list[str]:
    """Return names like those of pets, some syllables more likely than others."""
    generator = np.random.default_rng(0)
    begins = ("bu", "mo", "lu", "ze", "ri", "pi", "sa", "kü", "no", "ta", "fe", "go")
    middles, ends = ("l", "nn", "xi", "tt", "b", "s", "mmi", "rr"), ("a", "y", "o", "us", "ie", "e")
    names: dict[str, None] = {}
    while len(names) < num:
        parts = [part[int(len(part) * generator.random() ** 2)] for part in (begins, middles, ends)]
        second = begins[int(len(begins) * generator.random())] if generator.random() < 0.5 else ""
        names["".join((parts[0], second, *parts[1:])).capitalize()] = None
    return list(names)


def write_cifar10(folder: Path, num_each: int) -> None:
    """Write the binary version's six files: noise, over a faint pattern of the class."""
    generator = np.random.default_rng(0)
    half = generator.normal(0, 1, (10, 3, 8, 4))
    patterns = np.concatenate([half, half[..., ::-1]], axis=3).repeat(4, axis=2).repeat(4, axis=3)
    for name in (*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"):
        targets = np.arange(num_each) % 10
        noise = generator.normal(0, 60, (num_each, 3, 32, 32))
        pixels = (128 + noise + 14 * patterns[targets]).clip(0, 255).astype(np.uint8)
        records = np.concatenate(
            [targets[:, None].astype(np.uint8), pixels.reshape(num_each, -1)], axis=1
        )
        (folder / name).write_bytes(records.tobytes())


def write_images(folder: Path, num_classes: int, num_each: int) -> None:
    """Write images of 64x64 pixels: noise on a colour, by which 83 % can be told apart."""
    generator = np.random.default_rng(0)
    colours = generator.uniform(40, 215, (num_classes, 3))
    for number, colour in enumerate(colours):
        (folder / f"class{number:02}").mkdir()
        for i in range(num_each):
            middle = colour + generator.normal(0, 45, 3)
            pixels = (middle + generator.normal(0, 40, (SIZE, SIZE, 3))).clip(0, 255)
            path = folder / f"class{number:02}" / f"{i:02}.jpg"
            Image.fromarray(pixels.astype(np.uint8)).save(path)
