"""How much memory "auto" may take from a device and its host, and how much was in use."""

from __future__ import annotations

import sys

import torch

from lightning_fastft.core.errors import OptionError

# Of the memory that is free once model and optimizer are placed; the rest is for fragments and what nobody counts.
AUTO_VRAM_SHARE = 0.9
AUTO_HOST_SHARE = 0.5
# Where nobody counts the memory.
UNKNOWN_BYTES = 2**62


def auto_vram_bytes(device: torch.device) -> int:
    """Return what the process has on a device plus 90 % of what it could still get; without end where no
    allocator counts.
    """
    if device.type != "cuda":
        return UNKNOWN_BYTES
    free, total = torch.cuda.mem_get_info(device)
    reserved, allocated = torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)
    available = free + reserved - allocated
    # A cap on the process counts like a smaller card.
    share = getattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 1.0)(device)
    available = min(available, int(share * total) - allocated)
    return allocated + int(AUTO_VRAM_SHARE * available)


def auto_host_bytes() -> int:
    """Return half of what the host could give now, as its kernel estimates it."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            fields = dict(line.split(":", 1) for line in file)
        return int(AUTO_HOST_SHARE * int(fields["MemAvailable"].split()[0]) * 1024)
    except (OSError, KeyError):
        return UNKNOWN_BYTES


def peak_memory_bytes(device: torch.device) -> int:
    """Return the most memory in use so far: of the device's allocator, or of this process on the host; 0 on
    Windows, which does not count it so.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "win32":
        return 0
    # Not on Windows, so not at the top.
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Bytes on macOS, KiB elsewhere.
    return peak if sys.platform == "darwin" else peak * 1024


def is_unified(device: torch.device) -> bool:
    """Whether host and device share their memory, so that a copy frees nothing."""
    return device.type == "cuda" and bool(getattr(torch.cuda.get_device_properties(device), "is_integrated", False))


def check_not_unified(device: torch.device) -> None:
    """Refuse to offload where host and device share their memory.

    Raises:
        OptionError: They do.
    """
    if is_unified(device):
        raise OptionError(
            f"{torch.cuda.get_device_name(device)} shares its memory with the host, so offloading frees nothing: "
            "use OffloadCheckpointing('recompute')."
        )
