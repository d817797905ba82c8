"""What all integrations refuse in the same words."""

from prefect_torch_ddp.errors import InvalidParamsError


def refuse_options(refused: dict[str, bool]) -> None:
    """Raise InvalidParamsError if any of these is set; the error names each that is."""
    if found := [name for name, is_set in refused.items() if is_set]:
        msg = f"attach can't keep this training right: it uses {'; '.join(found)}"
        raise InvalidParamsError(msg)
