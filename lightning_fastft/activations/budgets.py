"""Memory budgets for "auto" on a device and its host, and the peak memory in use."""

from __future__ import annotations

import sys

import torch

from lightning_fastft.core.errors import OptionError

# Share of the memory that is free once model and optimizer are placed; the rest covers fragmentation.
AUTO_VRAM_SHARE = 0.9
AUTO_HOST_SHARE = 0.5
# Budget for a device without a counting allocator.
UNKNOWN_BYTES = 2**62


def auto_vram_bytes(device: torch.device) -> int:
    """Return the memory of the process on a device plus 90 % of the free memory; unlimited without CUDA."""
    if device.type != "cuda":
        return UNKNOWN_BYTES
    free, total = torch.cuda.mem_get_info(device)
    reserved, allocated = torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)
    available = free + reserved - allocated
    # A memory cap of the process has the effect of a smaller card.
    share = getattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 1.0)(device)
    available = min(available, int(share * total) - allocated)
    return allocated + int(AUTO_VRAM_SHARE * available)


def auto_host_bytes() -> int:
    """Return half of the memory that the kernel reports as available on the host."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            fields = dict(line.split(":", 1) for line in file)
        return int(AUTO_HOST_SHARE * int(fields["MemAvailable"].split()[0]) * 1024)
    except (OSError, KeyError):
        return UNKNOWN_BYTES


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak memory of the device's allocator, or of this process on the host; 0 on Windows."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "win32":
        return 0
    # Imported here because Windows does not have it.
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # ru_maxrss is in bytes on macOS and in KiB elsewhere.
    return peak if sys.platform == "darwin" else peak * 1024


def is_unified(device: torch.device) -> bool:
    """Return whether host and device share memory, so that offload frees nothing."""
    return device.type == "cuda" and bool(getattr(torch.cuda.get_device_properties(device), "is_integrated", False))


def check_not_unified(device: torch.device) -> None:
    """Refuse offload on a device that shares its memory with the host.

    Raises:
        OptionError: Host and device share memory.
    """
    if is_unified(device):
        raise OptionError(
            f"{torch.cuda.get_device_name(device)} shares its memory with the host, so offloading frees nothing: "
            "use OffloadCheckpointing('recompute')."
        )
