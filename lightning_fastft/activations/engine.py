"""The offload engine: copy tensors of a segment to pinned memory in the forward, and back before its backward."""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Iterator

import torch

from lightning_fastft.activations.slots import HostRegion, PinnedSlab, StagingSlot, align
from lightning_fastft.activations.streams import CopyStreams, Mark
from lightning_fastft.core.errors import SwapError

logger = logging.getLogger(__name__)

_POISON_BYTE = 0xFF  # NaN in every floating dtype


class HostAllocation:
    """A tensor in pinned memory; its memory is freed when the allocation is garbage-collected."""

    __slots__ = (
        "__weakref__",
        "_engine",
        "arrived",
        "done",
        "dtype",
        "group",
        "num_bytes",
        "region",
        "shape",
        "staged",
        "stride",
    )

    def __init__(
        self, engine: OffloadEngine, *, group: Group, region: HostRegion, tensor: torch.Tensor, done: Mark
    ) -> None:
        self._engine, self.group, self.region, self.done = engine, group, region, done
        self.shape, self.stride, self.dtype = tensor.shape, tensor.stride(), tensor.dtype
        self.num_bytes = tensor.nbytes
        self.staged: torch.Tensor | None = None
        self.arrived: Mark | None = None

    def __del__(self) -> None:
        """Queue the region to be freed by the next store, because any thread may run this."""
        self._engine._dropped.append((self.region, (self.done, self.arrived)))


class Group:
    """Host tensors of a segment in one forward, in the order of use in its backward."""

    __slots__ = ("__weakref__", "_allocations", "slot")

    def __init__(self) -> None:
        self._allocations: list[weakref.ref[HostAllocation]] = []
        self.slot: StagingSlot | None = None

    def add(self, allocation: HostAllocation) -> None:
        """Append an allocation; the group does not keep it alive."""
        self._allocations.append(weakref.ref(allocation))

    def allocations(self) -> Iterator[HostAllocation]:
        """Yield the allocations that are alive."""
        for reference in self._allocations:
            allocation = reference()
            if allocation is not None:
                yield allocation


class OffloadEngine:
    """Own the pinned slab, the staging slots and the order of copies of one device.

    In the forward, ``store`` starts the copy of a tensor and keeps the source alive until the compute stream has waited
    for the copy; at most ``slot_bytes`` are in flight. In the backward, ``enter_backward`` of a segment starts the
    copies of the previous segment, so that ``load`` finds its tensors on the device. Dtype and strides are preserved.

    Args:
        streams: The copy streams of the device.
        host_bytes: Size of the slab, for all host tensors of the forwards that are alive at once.
        slot_bytes: Size of a staging slot, for the host tensors of one segment.
        buffers: Number of slots; 2 fetches one segment ahead, 1 fetches on demand, serially.
        is_poisoned: Fill each freed slot with NaN, for tests.

    Raises:
        HostMemoryError: The slab cannot be allocated.

    Cost:
        No host sync, no allocation and no ``record_stream`` in a step that fits these sizes.

    Example:
        >>> from lightning_fastft.activations.streams import CopyStreams
        >>> engine = OffloadEngine(CopyStreams(), host_bytes=4096, slot_bytes=1024)
        >>> allocation = engine.store(engine.open_group(), torch.arange(3.0))
        >>> engine.load(allocation)
        tensor([0., 1., 2.])
    """

    def __init__(
        self, streams: CopyStreams, *, host_bytes: int, slot_bytes: int, buffers: int = 2, is_poisoned: bool = False
    ) -> None:
        self.streams = streams
        self.buffers = buffers
        self.slot_bytes = align(slot_bytes)
        self.slab = PinnedSlab(host_bytes, device=streams.device)
        self.slots = [StagingSlot(self.slot_bytes, streams=streams) for _ in range(buffers if host_bytes else 0)]
        self.is_poisoned = is_poisoned
        # Tensors that stayed on the device because the slab was full or they are not one dense block of bytes.
        self.num_kept = 0
        # Segments that were staged outside of the slots.
        self.num_unplanned = 0
        self._groups: deque[weakref.ref[Group]] = deque()
        self._current: Group | None = None
        self._in_flight: deque[tuple[Mark, torch.Tensor, int]] = deque()
        self._in_flight_bytes = 0
        self._dropped: deque[tuple[HostRegion, tuple[Mark | None, ...]]] = deque()

    def open_group(self) -> Group:
        """Open the group of a segment in a forward."""
        if self._current is not None:
            self._leave_current()
        while self._groups and self._groups[0]() is None:
            self._groups.popleft()
        group = Group()
        self._groups.append(weakref.ref(group))
        return group

    def store(self, group: Group, tensor: torch.Tensor) -> HostAllocation | None:
        """Start copying a tensor to the host.

        The tensor, on the device of the streams, must not be modified afterwards.

        Returns:
            The allocation for ``load``; None if the tensor stays on the device, because the slab is full or the tensor
            has gaps in memory.

        Raises:
            SwapError: An earlier tensor was modified during its copy.
        """
        flat = _flat_bytes(tensor)
        self._collect()
        region = None if flat is None else self.slab.reserve(flat.numel())
        if flat is None or region is None:
            self.num_kept += 1
            return None
        done = self._copy_out(region, flat)
        region.marks = []
        allocation = HostAllocation(self, group=group, region=region, tensor=tensor, done=done)
        group.add(allocation)
        self._in_flight.append((done, tensor, tensor._version))
        self._in_flight_bytes += allocation.num_bytes
        while self._in_flight_bytes > self.slot_bytes and len(self._in_flight) > 1:
            self._retire_oldest()
        return allocation

    def load(self, allocation: HostAllocation) -> torch.Tensor:
        """Return the tensor on the device, valid until the backward of its segment ends.

        Cost:
            None if it was prefetched; else the compute stream waits for the copy.
        """
        if allocation.staged is None:
            self.enter_backward(allocation.group)
        if allocation.staged is None:
            self._fetch(allocation.group, is_needed=True)
        assert allocation.staged is not None
        self.streams.wait_compute(allocation.arrived)  # type: ignore[arg-type]
        return allocation.staged

    def enter_backward(self, group: Group) -> None:
        """Start the backward of a segment: free the slot of the previous one and prefetch the next one."""
        if group is self._current:
            return
        self._leave_current()
        while self._in_flight:
            self._retire_oldest()
        self._current = group
        if group.slot is None:
            self._fetch(group, is_needed=True)
        for ahead in self._before(group, self.buffers - 1):
            if ahead.slot is None:
                self._fetch(ahead, is_needed=False)

    def close(self) -> None:
        """Wait for the copies and free all memory; a second call does nothing."""
        self.streams.synchronize()
        self._leave_current()
        self._in_flight.clear()
        self._in_flight_bytes = 0
        self._groups.clear()
        self._dropped.clear()
        self.slots = []
        self.slab.close()

    def _leave_current(self) -> None:
        """Free the slot of the segment whose backward has ended."""
        group, self._current = self._current, None
        if group is None or group.slot is None:
            return
        for allocation in group.allocations():
            allocation.staged = None
        slot, group.slot = group.slot, None
        if self.is_poisoned:
            slot.bytes.fill_(_POISON_BYTE)
        slot.leave(self.streams.mark_compute())

    def _before(self, group: Group, count: int) -> list[Group]:
        """Return the latest living groups with allocations that were opened before this one."""
        found: list[Group] = []
        is_earlier = False
        for reference in reversed(self._groups):
            other = reference()
            if other is group:
                is_earlier = True
            elif is_earlier and other is not None and any(True for _ in other.allocations()):
                found.append(other)
            if len(found) == count:
                break
        return found

    def _fetch(self, group: Group, *, is_needed: bool) -> None:
        """Start copying all host tensors of a segment into a slot."""
        allocations = list(group.allocations())
        num_bytes = sum(align(allocation.num_bytes) for allocation in allocations)
        if not allocations:
            return
        slot = next((slot for slot in self.slots if slot.is_free and slot.num_bytes >= num_bytes), None)
        if slot is None:
            if not is_needed:
                return
            # A segment outside of the planned order uses separate memory.
            self.num_unplanned += 1
            slot = StagingSlot(num_bytes, streams=self.streams)
        after = slot.take(group)
        group.slot = slot
        start = 0
        for allocation in allocations:
            target = slot.bytes[start : start + allocation.num_bytes]
            allocation.arrived = self.streams.copy_in(
                target, allocation.region.tensor[: allocation.num_bytes], after=[allocation.done, *after]
            )
            allocation.staged = _tensor_in(slot.bytes, start=start, allocation=allocation)
            start += align(allocation.num_bytes)
            after = []
        slot.note_copy(allocations[-1].arrived)  # type: ignore[arg-type]

    def _copy_out(self, region: HostRegion, flat: torch.Tensor) -> Mark:
        """Start the copy; if it fails, return the region to the slab."""
        is_queued = False
        try:
            done = self.streams.copy_out(
                region.tensor[: flat.numel()], flat, after=[self.streams.mark_compute(), *region.marks]
            )
            is_queued = True
        finally:
            if not is_queued:
                self.slab.release(region, marks=region.marks)
        return done

    def _retire_oldest(self) -> None:
        """Let compute wait for the oldest copy to the host, and release its source."""
        done, tensor, version = self._in_flight.popleft()
        self._in_flight_bytes -= tensor.nbytes
        self.streams.wait_compute(done)
        if tensor._version != version:
            raise SwapError(
                f"A tensor of shape {tuple(tensor.shape)} that a decoder layer keeps for its backward was written to "
                "in place while it was copied to the host. Keep it on the device: OffloadCheckpointing('recompute') or "
                "'keep'."
            )

    def _collect(self) -> None:
        """Return the regions of dead allocations to the slab."""
        while self._dropped:
            region, marks = self._dropped.popleft()
            self.slab.release(region, marks=marks)


def _tensor_in(memory: torch.Tensor, *, start: int, allocation: HostAllocation) -> torch.Tensor:
    """Return the tensor of an allocation at a byte of a slot, not as a view, so that autograd ignores later writes."""
    empty = torch.empty(0, dtype=allocation.dtype, device=memory.device)
    return empty.set_(memory.untyped_storage(), start // empty.element_size(), allocation.shape, allocation.stride)  # type: ignore[call-overload]


def _flat_bytes(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the bytes of a tensor in storage order; None if it has gaps, overlaps or no memory."""
    if (
        tensor.numel() == 0
        or tensor.layout is not torch.strided
        or tensor.is_conj()
        or tensor.is_neg()
        or not _is_dense(tensor)
    ):
        return None
    flat: torch.Tensor = tensor.detach().as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return whether the elements fill one block of memory without gaps or overlaps, in any order of axes."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for size, stride in sorted(
        ((size, stride) for size, stride in zip(tensor.shape, tensor.stride()) if size > 1), key=lambda pair: pair[1]
    ):
        if stride != expected:
            return False
        expected *= size
    return True
