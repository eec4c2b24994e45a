"""Memory budgets on a device and its host, the cap that keeps a process within one, and the peak memory in use."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable

import torch

from lightning_fastft.core.errors import OptionError

# Share of the memory that is free once model and optimizer are placed; the rest covers fragmentation.
AUTO_VRAM_SHARE = 0.9
AUTO_HOST_SHARE = 0.5
# The allocator compares the cap with the requested memory, but expandable segments grow in steps of this size.
SEGMENT_BYTES = 20 * 2**20
# Budget for a device without a counting allocator.
UNKNOWN_BYTES = 2**62
_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


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
    available = available_host_bytes()
    return available if available == UNKNOWN_BYTES else int(AUTO_HOST_SHARE * available)


def available_host_bytes() -> int:
    """Return the memory that the kernel reports as available on the host; unlimited where it reports none."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            fields = dict(line.split(":", 1) for line in file)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        return UNKNOWN_BYTES


def device_bytes(device: torch.device) -> int:
    """Return the memory of a CUDA device."""
    return int(torch.cuda.get_device_properties(device).total_memory)


def cap_memory(device: torch.device, num_bytes: int) -> Callable[[], None]:
    """Cap the memory that this process reserves on a device; return a function that lifts the cap.

    At the cap the allocator first returns its unused blocks to the device, then fails. A lower existing cap is kept.
    The limit is that of the caching allocator; the CUDA context and NCCL's buffers do not count.

    Raises:
        OptionError: The process has reserved more already.

    Cost:
        Frees the cached blocks, with one device sync.
    """
    torch.cuda.empty_cache()
    reserved = torch.cuda.memory_reserved(device)
    if reserved > num_bytes:
        raise OptionError(
            f"vram_budget is {num_bytes / 2**30:.2f} GiB, and this process holds {reserved / 2**30:.2f} GiB on "
            f"{device} before the first step. Free them (a model given to the Trainer may be on the CPU), or raise "
            "vram_budget."
        )
    before = getattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 1.0)(device)
    share = max(0, num_bytes - SEGMENT_BYTES) / device_bytes(device)
    torch.cuda.set_per_process_memory_fraction(min(before, share), device)
    return functools.partial(torch.cuda.set_per_process_memory_fraction, before, device)


def expand_segments() -> Callable[[], None] | None:
    """Enable expandable segments in the CUDA allocator, so that little reserved memory is unused.

    Returns:
        A function that disables them again; None if nothing changed, because the user has set PYTORCH_ALLOC_CONF,
        another allocator is in use, or the platform lacks expandable segments.
    """
    is_set_by_user = any(os.environ.get(name) for name in _ALLOCATOR_VARIABLES)
    if is_set_by_user or sys.platform == "win32" or torch.cuda.get_allocator_backend() != "native":
        return None
    # Newer versions of torch use this name, and warn about the old one.
    set_options = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    set_options = set_options or torch.cuda.memory._set_allocator_settings
    set_options("expandable_segments:True")
    return functools.partial(set_options, "expandable_segments:False")


def peak_reserved_bytes(device: torch.device) -> int:
    """Return the peak reserved memory of a device, in bytes; 0 without CUDA."""
    return torch.cuda.max_memory_reserved(device) if device.type == "cuda" else 0


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
