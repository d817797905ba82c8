"""Owns the CUDA device of a rank: which of those it sees it takes, and what tells devices apart."""

import os
import socket
from pathlib import Path

import torch

from prefect_torch_ddp.messages import RankLaunch

_device = torch.device("cpu")


def device_index(position: int | None, local_rank: int, num_devices: int) -> int:
    """Return the CUDA device of a rank. Pure.

    Args:
        position: which of the names in its CUDA_VISIBLE_DEVICES was chosen for it; None where that isn't set.
        local_rank: the rank's number on its host.
        num_devices: devices that torch sees; of several MIG instances that is one.
    """
    return (local_rank if position is None else position) % num_devices


def choose_device(launch: RankLaunch) -> None:
    """Choose the rank's device and make it the current one, whatever the backend; the CPU where there is no CUDA device."""
    global _device  # noqa: PLW0603 - one process is one rank
    num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if num_devices == 0:
        return
    index = device_index(launch.place.device_position, launch.place.local_rank, num_devices)
    torch.cuda.set_device(index)
    _device = torch.device("cuda", index)


def current_device() -> torch.device:
    """Return the device chosen for this rank; the CPU where nobody chose."""
    return _device


def device_name(device: torch.device) -> str | None:
    """Return what two ranks on one GPU have in common, as NCCL sees it: machine and bus; None for the CPU."""
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    try:
        bus = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}"  # type: ignore[attr-defined]
    except AttributeError:
        bus = str(properties.uuid)
    return f"{_machine()} {bus}"


def num_devices_seen() -> str:
    """Say how many CUDA devices this process sees, and by which setting."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "unset")
    return f"{torch.cuda.device_count()} CUDA devices are visible there, CUDA_VISIBLE_DEVICES {visible}"


def _machine() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()
