"""Where a run's models and checkpoints are, and how to load them."""

from collections.abc import Mapping
from urllib.parse import unquote, urlsplit

from prefect_torch_ddp.results import CheckpointRef, TrainReport
from prefect_torch_ddp.tasks.report.markdown import code, code_block, count, number, text


def checkpoint_list(report: TrainReport) -> str:
    """List where the models and the checkpoints are.

    Locations are code, since a browser can't follow `s3://`, and no table cells, which cut them.
    """
    training = report.training
    roles: dict[str, list[str]] = {}
    refs: dict[str, CheckpointRef] = {}
    for role, ref in (
        ("evaluated", report.checkpoint),
        ("best", training.best_checkpoint),
        ("last", training.last_checkpoint),
    ):
        if ref is not None:
            refs[ref.uri] = ref
            roles.setdefault(ref.uri, []).append(role)
    lines = []
    for name, uri in training.model_uris.items():
        card = code(f"{uri.rpartition('.')[0]}.json")
        step = count(report.checkpoint.step)
        lines.append(f"- **Weights** of {code(name)}, step {step}: {code(uri)}; their card: {card}")
    for uri, ref in refs.items():
        metrics = "".join(f", {text(name)} {number(value)}" for name, value in ref.metrics.items())
        which = " and ".join(roles[uri]).capitalize()
        about = f"step {count(ref.step)}, attempt {ref.attempt}{metrics}"
        lines.append(f"- **{which} checkpoint**, {about}: {code(uri)}")
    return "\n".join(lines)


def load_section(model_uris: Mapping[str, str]) -> str:
    """Show how to load the models, or say why there is none."""
    if not model_uris:
        return "No model was exported: `train` tracked none. `ctx.track(model=model)` names it."
    blocks = [load_code(name, uri) for name, uri in model_uris.items()]
    return "\n\n".join(["Load the weights, on any machine, with plain PyTorch:", *blocks])


def load_code(name: str, model_uri: str) -> str:
    """Show the three lines that load a model; fsspec reads it where it isn't a local file."""
    parts = urlsplit(model_uri)
    is_local = parts.scheme in {"", "file"}
    path = repr(unquote(parts.path) if parts.scheme else model_uri)
    if not is_local:
        path = f"fsspec.open({model_uri!r}).open()"
    module, load = "torch", 'torch.load(file, map_location="cpu", weights_only=True)'
    if model_uri.endswith(".safetensors"):
        module = "safetensors.torch"
        load = f"{module}.load_file(file)" if is_local else f"{module}.load(file.read())"
    modules = module if is_local else f"fsspec, {module}"
    return code_block(f"import {modules}\nfile = {path}\n{name}.load_state_dict({load})")
