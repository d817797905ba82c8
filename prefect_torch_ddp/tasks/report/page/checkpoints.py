"""Where a run's models and checkpoints are, and how to load them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from prefect_torch_ddp.results import CheckpointRef, TrainReport
from prefect_torch_ddp.storage.locate import opens_by_fsspec
from prefect_torch_ddp.tasks.report.markdown import code, code_block, count, number, size, text

MAX_CHECKPOINTS = 10
MAX_METRICS = 10


@dataclass(frozen=True)
class KeptCheckpoint:
    """A checkpoint that is in the storage."""

    ref: CheckpointRef
    num_bytes: int
    digest: str
    """The sha256 of its manifest, which holds the digests of all it consists of."""


def checkpoint_list(report: TrainReport | None, kept: Sequence[KeptCheckpoint] = ()) -> str:
    """List where the models and the checkpoints are, the newest first; nothing without any.

    Locations are code, since a browser can't follow `s3://`, and no table cells, which cut them.
    """
    roles: dict[str, list[str]] = {}
    refs: dict[str, CheckpointRef] = {}
    lines = []
    if report is not None:
        for name, uri in report.training.model_uris.items():
            card = code(f"{uri.rpartition('.')[0]}.json")
            where = f"{code(uri)}; their card: {card}"
            step = count(report.checkpoint.step)
            lines.append(f"- **Weights** of {code(name)}, step {step}: {where}")
        for role, ref in (
            ("evaluated", report.checkpoint),
            ("best", report.training.best_checkpoint),
            ("last", report.training.last_checkpoint),
        ):
            if ref is not None:
                refs[ref.uri] = ref
                roles.setdefault(ref.uri, []).append(role)
    refs |= {one.ref.uri: one.ref for one in reversed(kept) if one.ref.uri not in refs}
    about = {one.ref.uri: f", {size(one.num_bytes)}, sha256 {code(one.digest)}" for one in kept}
    for uri, ref in list(refs.items())[:MAX_CHECKPOINTS]:
        which = f"{' and '.join(roles.get(uri, []))} checkpoint".strip().capitalize()
        shown = list(ref.metrics.items())[:MAX_METRICS]
        metrics = "".join(f", {text(name)} {number(value)}" for name, value in shown)
        if (num_more := len(ref.metrics) - len(shown)) > 0:
            metrics += f" and {num_more} more metrics"
        at = f"step {count(ref.step)}, attempt {ref.attempt}{metrics}{about.get(uri, '')}"
        lines.append(f"- **{which}**, {at}: {code(uri)}")
    if len(refs) > MAX_CHECKPOINTS:
        lines.append(f"- {len(refs) - MAX_CHECKPOINTS} older checkpoints are left out.")
    return "\n".join(lines)


def load_section(model_uris: Mapping[str, str]) -> str:
    """Show how to load the models, or say why there is none."""
    if not model_uris:
        return "No model was exported: `train` tracked none. `ctx.track(model=model)` names it."
    blocks = [load_code(name, uri) for name, uri in model_uris.items()]
    return "\n\n".join(["Load the weights, on any machine, with plain PyTorch:", *blocks])


def load_code(name: str, model_uri: str) -> str:
    """Show the three lines that load a model.

    By fsspec, which torch brings, or from a storage that fsspec can't open.
    """
    module, load = "torch", 'torch.load(file, map_location="cpu", weights_only=True)'
    if model_uri.endswith(".safetensors"):
        module, load = "safetensors.torch", "safetensors.torch.load(file.read())"
    opener, source = "fsspec", f"fsspec.open({model_uri!r}).open()"
    if not opens_by_fsspec(model_uri):
        folder, _, file = model_uri.rpartition("/")
        opener = "io, prefect_torch_ddp"
        data = f"prefect_torch_ddp.storage_from_uri({folder!r}).read({file!r})"
        source = f"io.BytesIO({data})"
    return code_block(f"import {opener}, {module}\nfile = {source}\n{name}.load_state_dict({load})")
