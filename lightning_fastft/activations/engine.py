"""The offload engine: tensors of a segment leave for pinned memory in the forward and are back before its
backward asks for them.
"""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch

from lightning_fastft.activations.slots import HostRegion, PinnedSlab, StagingSlot, align
from lightning_fastft.activations.streams import CopyStreams, Mark
from lightning_fastft.core.errors import SwapError

logger = logging.getLogger(__name__)

_POISON_BYTE = 0xFF  # makes every floating dtype a NaN


class HostAllocation:
    """Stand for one tensor that lies in pinned memory; the memory is given back when the allocation dies.

    Args:
        engine: Who copies.
        group: The segment that the tensor belongs to.
        region: Where its bytes are.
        tensor: The tensor, for its shape, strides and dtype.
        done: The point after the copy out.
    """

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
        self.num_bytes = tensor.numel() * tensor.element_size()
        self.staged: torch.Tensor | None = None
        self.arrived: Mark | None = None

    def __del__(self) -> None:
        """Hand the region over; any thread may run this, so the slab itself is left to the next store."""
        self._engine._dropped.append((self.region, (self.done, self.arrived)))


class Group:
    """The host tensors of one segment in one forward, in the order in which its backward needs them."""

    __slots__ = ("__weakref__", "_allocations", "slot")

    def __init__(self) -> None:
        self._allocations: list[weakref.ref[HostAllocation]] = []
        self.slot: StagingSlot | None = None

    def add(self, allocation: HostAllocation) -> None:
        """Append a allocation; the group does not keep it alive."""
        self._allocations.append(weakref.ref(allocation))

    def allocations(self) -> Iterator[HostAllocation]:
        """Yield the allocations that live."""
        for reference in self._allocations:
            allocation = reference()
            if allocation is not None:
                yield allocation


class OffloadEngine:
    """Own the pinned slab, the staging slots and the order of copies of one device.

    In the forward, ``store`` starts the copy of a tensor as soon as it exists and keeps the source alive until the
    compute stream has waited for the copy; at most ``slot_bytes`` are on their way. In the backward, ``enter_backward``
    of a segment starts the copies of the one before it, so that ``load`` finds the tensor there whether the host runs
    ahead or not. Copies move bytes: dtype and strides come back as they were.

    Args:
        streams: The copy streams of the device.
        host_bytes: Size of the slab: all host tensors of the forwards that are alive at once.
        slot_bytes: Size of a staging slot: the host tensors of one segment.
        buffers: Number of slots; 2 fetches one segment ahead, 1 fetches when the backward asks (the serial form).
        is_poisoned: Fill every slot that is left with NaN; for tests.

    Raises:
        HostMemoryError: The slab cannot be had.

    Cost:
        No host synchronisation, no allocation and no ``record_stream`` in a step that fits the sizes given here.

    Example:
        >>> from lightning_fastft.activations.streams import ImmediateStreams
        >>> engine = OffloadEngine(ImmediateStreams(), host_bytes=4096, slot_bytes=1024)
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
        # Tensors that stayed on the device because the slab was full or their layout is no plain block of bytes.
        self.num_kept = 0
        # Segments that had to be staged outside the slots.
        self.num_unplanned = 0
        self._groups: deque[weakref.ref[Group]] = deque()
        self._current: Group | None = None
        self._in_flight: deque[tuple[Mark, torch.Tensor, int]] = deque()
        self._in_flight_bytes = 0
        self._dropped: deque[tuple[HostRegion, tuple[Mark | None, ...]]] = deque()

    def open_group(self) -> Group:
        """Begin a segment of a forward."""
        if self._current is not None:
            self._leave_current()
        while self._groups and self._groups[0]() is None:
            self._groups.popleft()
        group = Group()
        self._groups.append(weakref.ref(group))
        return group

    def store(self, group: Group, tensor: torch.Tensor) -> HostAllocation | None:
        """Start copying a tensor to the host.

        Args:
            group: The segment it belongs to.
            tensor: On the device of the streams; not written to any more.

        Returns:
            What ``load`` takes; None where the tensor has to stay: the slab is full, or its elements are no gapless
            block of memory.

        Raises:
            SwapError: An earlier tensor was written to while it was being copied.
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
        """Return the tensor on the device; valid until the backward of its segment is over.

        Cost:
            None where it was fetched ahead; else the copy, which the compute stream waits for.
        """
        if allocation.staged is None:
            self.enter_backward(allocation.group)
        if allocation.staged is None:
            self._fetch(allocation.group, is_needed=True)
        assert allocation.staged is not None
        self.streams.wait_compute(allocation.arrived)  # type: ignore[arg-type]
        return allocation.staged

    def enter_backward(self, group: Group) -> None:
        """Say that the backward has reached a segment: the slots of the one before are free, the next one's
        copies start.
        """
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
        """Wait for the copies and give all memory back; a second call does nothing."""
        self.streams.synchronize()
        self._leave_current()
        self._in_flight.clear()
        self._in_flight_bytes = 0
        self._groups.clear()
        self._dropped.clear()
        self.slots = []
        self.slab.close()

    def _leave_current(self) -> None:
        """Free the slot of the segment whose backward is over."""
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
            # Segments out of the planned order: they still come back right, from memory of their own.
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
        """Start the copy; a region whose copy is refused goes back to the slab."""
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
        """Have compute wait for the oldest copy out, and let go of its source."""
        done, tensor, version = self._in_flight.popleft()
        self._in_flight_bytes -= tensor.numel() * tensor.element_size()
        self.streams.wait_compute(done)
        if tensor._version != version:
            raise SwapError(
                f"A tensor of shape {tuple(tensor.shape)} that a decoder layer keeps for its backward was written to "
                "in place while it was copied to "
                "the host. Keep it on the device: OffloadCheckpointing('recompute') or 'keep'."
            )

    def _collect(self) -> None:
        """Give the regions of dead allocations back to the slab."""
        while self._dropped:
            region, marks = self._dropped.popleft()
            self.slab.release(region, marks=[mark for mark in marks if mark is not None])


def _tensor_in(memory: torch.Tensor, *, start: int, allocation: HostAllocation) -> torch.Tensor:
    """Return the tensor of a allocation at a byte of a slot; no view of the slot, so that autograd sees no
    writing to it when the slot is used again.
    """
    empty = torch.empty(0, dtype=allocation.dtype, device=memory.device)
    return empty.set_(memory.untyped_storage(), start // empty.element_size(), allocation.shape, allocation.stride)  # type: ignore[call-overload]


def _flat_bytes(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the memory of a tensor as bytes in storage order; None where it has gaps or overlaps, or no memory
    at all.
    """
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
    """Whether the elements fill one stretch of memory, each place once, in any order of axes."""
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


def describe_use(engine: OffloadEngine) -> dict[str, Any]:
    """Return what the engine holds now, in plain numbers, for reports and leak tests."""
    engine._collect()
    return {
        "pinned_bytes": engine.slab.num_bytes,
        "pinned_used_bytes": engine.slab.used_bytes,
        "staging_bytes": sum(slot.num_bytes for slot in engine.slots),
        "num_kept": engine.num_kept,
        "num_unplanned": engine.num_unplanned,
        "num_replaced": sum(slot.num_replaced for slot in engine.slots),
    }
