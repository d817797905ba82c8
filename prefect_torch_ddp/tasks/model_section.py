"""Owns what the reports say of a run's model and checkpoints: where they are, and how plain PyTorch loads the model. Pure."""

from urllib.parse import unquote, urlsplit

from prefect_torch_ddp.results import CheckpointRef, TrainReport
from prefect_torch_ddp.tasks.markdown import code, code_block, count, number, text


def checkpoint_list(report: TrainReport) -> str:
    """List where the model and the checkpoints are.

    Places are code, since `s3://` is no link that a browser could follow, and no table cells, which cut them off.
    """
    training = report.training
    roles: dict[tuple[int, int, str], list[str]] = {}
    refs: dict[tuple[int, int, str], CheckpointRef] = {}
    for role, ref in (("evaluated", report.checkpoint), ("best", training.best_checkpoint), ("last", training.last_checkpoint)):
        if ref is not None:
            place = (ref.step, ref.attempt, ref.uri)
            refs[place] = ref
            roles.setdefault(place, []).append(role)
    lines = []
    if report.model_uri is not None:
        card = f"{report.model_uri.rpartition('/')[0]}/model.json"
        lines.append(
            f"- **Model weights** of step {count(report.checkpoint.step)}: {code(report.model_uri)}; their card: {code(card)}"
        )
    for place, ref in refs.items():
        metrics = "".join(f", {text(name)} {number(value)}" for name, value in ref.metrics.items())
        which = " and ".join(roles[place]).capitalize()
        lines.append(f"- **{which} checkpoint**, step {count(ref.step)}, attempt {ref.attempt}{metrics}: {code(ref.uri)}")
    return "\n".join(lines)


def load_section(model_uri: str | None) -> str:
    """Show how to load the model, or say why there is none."""
    if model_uri is None:
        return "No model was exported: `train` tracked none. `rank.track(model=model)` names it."
    return f"Load the model, on any machine, with plain PyTorch:\n\n{load_code(model_uri)}"


def load_code(model_uri: str) -> str:
    """Show the three lines that load the model."""
    parts = urlsplit(model_uri)
    is_local, is_safetensors = parts.scheme in {"", "file"}, model_uri.endswith(".safetensors")
    path = repr(unquote(parts.path) if parts.scheme else model_uri)
    place = path if is_local else f"fsspec.open({model_uri!r}).open()"
    load = 'torch.load(file, map_location="cpu", weights_only=True)'
    if is_safetensors:
        load = "safetensors.torch.load_file(file)" if is_local else "safetensors.torch.load(file.read())"
    modules = ([] if is_local else ["fsspec"]) + ["safetensors.torch" if is_safetensors else "torch"]
    return code_block(f"import {', '.join(modules)}\nfile = {place}\nmodel.load_state_dict({load})")
