"""Memory of offload: a pinned slab on the host, allocated in regions, and fixed staging slots on the device."""

from __future__ import annotations

import bisect
import contextlib
import logging
import mmap
import time
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from lightning_fastft.activations.streams import CopyStreams, Mark
from lightning_fastft.core.errors import HostMemoryError

# Alignment of copies, for full speed of the copy engines and for any dtype.
ALIGNMENT_BYTES = 512
# Log pinning from this size on; it takes about one second per GiB.
SLOW_PINNING_BYTES = 2**30
_CUDA_HOST_REGISTER_PORTABLE = 1

logger = logging.getLogger(__name__)


def align(num_bytes: int) -> int:
    """Return num_bytes rounded up to whole alignment units.

    Example:
        >>> align(1), align(512), align(513)
        (512, 512, 1024)
    """
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


class HostRegion:
    """A part of the slab.

    Args:
        start: First byte in the slab.
        num_bytes: Length, a multiple of the alignment.
        tensor: The bytes.
    """

    __slots__ = ("marks", "num_bytes", "start", "tensor")

    def __init__(self, start: int, num_bytes: int, tensor: torch.Tensor) -> None:
        self.start, self.num_bytes, self.tensor = start, num_bytes, tensor
        # Marks of copies that still read or write these bytes.
        self.marks: list[Mark] = []


class PinnedSlab:
    """One block of page-locked host memory of exact size, registered once and allocated in regions.

    PyTorch's own pinned allocator rounds every block up to a power of two; this one rounds each region up to 512 bytes,
    and the block to whole pages, which no other block shares.

    Raises:
        HostMemoryError: The memory cannot be allocated or pinned.

    Cost:
        About one second per GiB for CUDA, once; no device sync.
    """

    def __init__(self, num_bytes: int, *, device: torch.device) -> None:
        self.num_bytes = align(num_bytes)
        self._unregister: weakref.finalize[..., Any] | None = None
        # Free ranges as (start, length), sorted by start.
        self._free: list[tuple[int, int]] = [(0, self.num_bytes)] if num_bytes else []
        # Marks of the last use, by start of the freed region.
        self._pending: dict[int, tuple[int, list[Mark]]] = {}
        try:
            # Whole pages: memory is pinned by pages, and none can be pinned twice. torch looks for pinned memory at the
            # start of a storage, so the storage starts with a page.
            pages = mmap.mmap(-1, max(1, self.num_bytes), access=mmap.ACCESS_COPY)
        except OSError as error:
            raise HostMemoryError(
                f"The host has no {self.num_bytes / 2**30:.1f} GiB for offloaded tensors: lower host_budget. ({error})"
            ) from error
        self._bytes = torch.frombuffer(pages, dtype=torch.uint8)
        if device.type == "cuda" and num_bytes:
            self._register(device)

    @property
    def used_bytes(self) -> int:
        """Bytes allocated now."""
        return self.num_bytes - sum(length for _, length in self._free)

    def reserve(self, num_bytes: int) -> HostRegion | None:
        """Return a region of at least num_bytes, first fit, or None."""
        wanted = align(max(1, num_bytes))
        for index, (start, length) in enumerate(self._free):
            if length >= wanted:
                if length == wanted:
                    del self._free[index]
                else:
                    self._free[index] = (start + wanted, length - wanted)
                region = HostRegion(start, wanted, self._bytes[start : start + wanted])
                region.marks = self._take_pending(start, start + wanted)
                return region
        return None

    def release(self, region: HostRegion, *, marks: Sequence[Mark]) -> None:
        """Free a region; the next use of its bytes waits for the marks."""
        kept = [mark for mark in marks if mark is not None]
        if kept:
            self._pending[region.start] = (region.start + region.num_bytes, kept)
        start, end = region.start, region.start + region.num_bytes
        index = bisect.bisect(self._free, (start, 0))
        if index < len(self._free) and self._free[index][0] == end:
            end += self._free.pop(index)[1]
        if index and sum(self._free[index - 1]) == start:
            index -= 1
            start = self._free.pop(index)[0]
        self._free.insert(index, (start, end - start))

    def close(self) -> None:
        """Unpin and free the memory after all copies; a second call does nothing."""
        if self._unregister is not None:
            self._unregister()
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._free, self.num_bytes = [], 0

    def _take_pending(self, start: int, end: int) -> list[Mark]:
        """Remove and return the marks of earlier regions that overlap these bytes."""
        # Every step stores the same tensors in the same order, so they reuse the regions of the previous step.
        if start in self._pending and self._pending[start][0] == end:
            return self._pending.pop(start)[1]
        marks: list[Mark] = []
        for other, (other_end, other_marks) in list(self._pending.items()):
            if other < end and start < other_end:
                marks += other_marks
                del self._pending[other]
                # The parts on either side keep their marks.
                if other < start:
                    self._pending[other] = (start, other_marks)
                if end < other_end:
                    self._pending[end] = (other_end, other_marks)
        return marks

    def _register(self, device: torch.device) -> None:
        is_slow = self.num_bytes >= SLOW_PINNING_BYTES
        gib = self.num_bytes / 2**30
        if is_slow:
            logger.info("pinning %.1f GiB of host memory, about %.0f s", gib, gib)
        begin = time.perf_counter()
        address, num_bytes = self._bytes.data_ptr(), self._bytes.nbytes
        status = int(torch.cuda.cudart().cudaHostRegister(address, num_bytes, _CUDA_HOST_REGISTER_PORTABLE))
        if status:
            # Clear the error; otherwise the next launch would report it.
            with contextlib.suppress(RuntimeError):
                torch.zeros(1, device=device)
            raise HostMemoryError(
                f"The host refuses to pin {gib:.1f} GiB (CUDA error {status}): lower host_budget, or raise the limit "
                "on locked memory. Under WSL, pinned memory is limited to a share of the host's memory."
            )
        # Unpin even if close is never called: memory that is freed while pinned cannot be pinned again.
        self._unregister = weakref.finalize(self, _unregister, self._bytes)
        if is_slow:
            logger.info("pinned %.1f GiB in %.1f s", gib, time.perf_counter() - begin)


def _unregister(pinned: torch.Tensor) -> None:
    torch.cuda.check_error(int(torch.cuda.cudart().cudaHostUnregister(pinned.data_ptr())))


class StagingSlot:
    """A fixed block of device memory for the host tensors of one segment."""

    def __init__(self, num_bytes: int, *, streams: CopyStreams) -> None:
        self.num_bytes = num_bytes
        self.num_replaced = 0
        self._streams = streams
        self._owner: weakref.ref[Any] | None = None
        self._marks: list[Mark] = []
        self._allocate()

    @property
    def is_free(self) -> bool:
        """Whether no live segment uses it."""
        return self._owner is None or self._owner() is None

    def take(self, owner: object) -> list[Mark]:
        """Assign the slot to a segment; return the marks that its first copy must wait for.

        If a tensor in the slot outlives its segment, it keeps the memory, and the slot allocates another block.
        """
        if _num_holders(self.bytes) > 1:
            self.num_replaced += 1
            if self.num_replaced == 1:
                logger.warning(
                    "a staged tensor outlived the backward of its decoder layer; it keeps the slot's %d bytes, and the "
                    "slot allocates new ones",
                    self.num_bytes,
                )
            self._allocate()
        marks, self._marks = self._marks, []
        self._owner = weakref.ref(owner)
        return marks

    def note_copy(self, mark: Mark) -> None:
        """Remember a copy into the slot, in case its owner dies before the slot is freed."""
        self._marks = [mark]

    def leave(self, mark: Mark) -> None:
        """Free the slot; its next copy waits for the mark."""
        self._owner = None
        self._marks = [mark]

    def _allocate(self) -> None:
        self.bytes = torch.empty(self.num_bytes, dtype=torch.uint8, device=self._streams.device)
        # The allocator may return memory that queued work of the compute stream still uses.
        self._marks = [self._streams.mark_compute()]


def _num_holders(tensor: torch.Tensor) -> int:
    """Return the number of tensors that share this storage."""
    storage = tensor.untyped_storage()
    # The storage object created here is one of the holders.
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1
