"""Resume points: the checkpoint of another run, in any storage, that a new run starts from."""

import re
from collections.abc import Callable
from dataclasses import dataclass

from prefect_torch_ddp.checkpoint.manifest import (
    Manifest,
    checkpoint_ref,
    find_manifest,
    list_manifests,
    read_manifest,
)
from prefect_torch_ddp.errors import CheckpointError, InvalidParamsError
from prefect_torch_ddp.results import CheckpointRef
from prefect_torch_ddp.storage.protocol import Storage

_REFERENCE = re.compile(
    r"(?:(?P<root>.*/|)runs/)?(?P<run_id>[^/]+)"
    r"(?:/checkpoints/step-(?P<step>\d+)(?:/(?P<attempt>\d+))?(?:/manifest\.json)?)?/?"
)
_FORMS = (
    "write a run's id, or <storage>/runs/<run id>, or "
    "<storage>/runs/<run id>/checkpoints/step-00000400, "
    "perhaps with the attempt that made it: .../step-00000400/000002"
)


@dataclass(frozen=True)
class ResumePoint:
    """A run, or one checkpoint of it, to resume from."""

    storage: Storage
    run_id: str
    step: int | None = None
    """None: the newest checkpoint."""
    attempt: int | None = None
    """Who made the checkpoint of that step; None: the newest attempt whose checkpoint counts."""
    only_weights: bool = False
    """Whether only modules are loaded from there; optimizer and data order start over."""

    @property
    def uri(self) -> str:
        """Its place, as a person would write it."""
        run = f"{self.storage.uri.rstrip('/')}/runs/{self.run_id}"
        step = "" if self.step is None else f"/checkpoints/step-{self.step:08d}"
        return run + step + ("" if self.attempt is None else f"/{self.attempt:06d}")

    def manifest(self) -> Manifest:
        """Return the manifest of the step, or the newest one, without a look at its objects.

        CheckpointError: there is none, or it is damaged.
        """
        if self.step is None:
            if manifests := list_manifests(self.storage, self.run_id):
                return manifests[-1]
            msg = f"{self.storage.uri} holds no complete checkpoint of run {self.run_id}"
            raise CheckpointError(msg)
        if self.attempt is None:
            return find_manifest(self.storage, self.run_id, self.step)
        return read_manifest(self.storage, self.run_id, self.step, self.attempt)

    def checkpoint(self) -> CheckpointRef:
        """Return the reference to that checkpoint; CheckpointError: there is none."""
        return checkpoint_ref(self.storage, self.manifest())

    def find(self) -> Manifest:
        """Return the same, for what a person named; InvalidParamsError if there is none."""
        try:
            return self.manifest()
        except CheckpointError as error:
            msg = f"resume_from names {self.uri}, but {error}"
            raise InvalidParamsError(msg) from error


def parse_resume_from(
    reference: str, own: Storage, resolve: Callable[[str], Storage]
) -> ResumePoint:
    """Parse what a person wrote; nothing is looked for.

    Args:
        reference: see `_FORMS`; the storage is a path, an `s3://` URI or a block's reference.
        own: the new run's storage, in which a mere id is; its credentials are used for every URI
            that they lead to.
        resolve: makes a storage of what comes before `/runs/`.

    Raises:
        InvalidParamsError: it names no run; says which forms there are.
    """
    match = _REFERENCE.fullmatch(reference)
    if match is None or (match["root"] is None and match["run_id"] in (".", "..")):
        shown = reference.rpartition("@")[2]  # what is before it may be a secret
        msg = f"resume_from is {shown!r}, which names no run; {_FORMS}"
        raise InvalidParamsError(msg)
    step = int(match["step"]) if match["step"] else None
    attempt = int(match["attempt"]) if match["attempt"] else None
    if match["root"] is None:
        return ResumePoint(own, match["run_id"], step, attempt)
    root = re.sub(r"(?<=.)/$", "", match["root"]) or "."
    reached = own.relocated(root)
    storage = resolve(root) if reached is None else reached
    return ResumePoint(storage, match["run_id"], step, attempt)
