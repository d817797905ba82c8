"""The CUDA device of a rank: which one it takes, and how devices are identified."""

import os
from pathlib import Path
from typing import Any

import torch

from prefect_torch_ddp.protocol.rank import RankLaunch

_device = torch.device("cpu")


def device_index(position: int | None, local_rank: int, num_devices: int) -> int:
    """Return the CUDA device of a rank, by the position in its CUDA_VISIBLE_DEVICES if that is set.

    Of several MIG instances torch sees one device.
    """
    return (local_rank if position is None else position) % num_devices


def choose_device(launch: RankLaunch) -> None:
    """Make the rank's CUDA device the current one, whatever the backend; without CUDA the CPU."""
    global _device  # noqa: PLW0603 - one process is one rank
    num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if num_devices == 0:
        return
    index = device_index(launch.place.device_position, launch.place.local_rank, num_devices)
    torch.cuda.set_device(index)
    _device = torch.device("cuda", index)


def current_device() -> torch.device:
    """Return the device chosen for this rank; the CPU where none was chosen."""
    return _device


def device_name(device: torch.device) -> str | None:
    """Return machine and bus, by which NCCL tells GPUs apart; None for the CPU."""
    if device.type != "cuda":
        return None
    properties: Any = torch.cuda.get_device_properties(device)  # torch's stubs lack what is used
    numbers = properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id
    machine = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{machine} {numbers[0]:04x}:{numbers[1]:02x}:{numbers[2]:02x}"


def num_devices_seen() -> str:
    """Say how many CUDA devices this process sees, and by which setting."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "unset")
    count = torch.cuda.device_count()
    return f"{count} CUDA devices are visible there, CUDA_VISIBLE_DEVICES {visible}"
