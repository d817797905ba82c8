"""Makes the environments that other libraries' ways to read images run in: one for each, named
as the package that it is for.

    python -m tests.benchmarks.image_envs FOLDER [name ...]
    PTD_BENCH_ENVS=FOLDER make bench ARGS="-k image_folder"

Run by the interpreter of the project's own environment. torch, torchvision, pillow, numpy and
boto3 are that one's, through a `.pth` file, as far as the library bears them; what it wants
otherwise goes into its own environment and comes first there.
"""

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

NAMES = ("s3torchconnector", "webdataset", "litdata", "mosaicml-streaming")


def make(folder: Path) -> None:
    """Make an environment, and install what it is named after."""
    venv.create(folder, with_pip=True)
    python = str(folder / "bin" / "python")
    ask = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    own = subprocess.run(
        [python, "-c", ask], capture_output=True, text=True, check=True
    ).stdout.strip()
    (Path(own) / "zz-of-the-project.pth").write_text(
        sysconfig.get_paths()["purelib"] + "\n"
    )  # after its own, by the alphabet
    subprocess.run([python, "-m", "pip", "install", folder.name], check=True)
    subprocess.run([python, "-c", "import torch, torchvision"], check=True)


if __name__ == "__main__":
    for name in sys.argv[2:] or NAMES:
        make(Path(sys.argv[1]).resolve() / name)
