"""The batches that a user's own loop has and has not trained yet, and which of them the module has read."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

from lightning_fastft.packing.collate import PackedBatch
from lightning_fastft.strategies.packed_steps import find_packed_batches


class Handed:
    """A batch that a loader has handed to the loop.

    Args:
        batch: The batch.
        awaits_backward: Whether it may be asked for its successor before its backward, as a loop that looks ahead does.
    """

    def __init__(self, batch: Any, *, awaits_backward: bool) -> None:
        self.awaits_backward = awaits_backward
        packed = find_packed_batches(batch)
        self.is_packed = bool(packed)
        self.reads_before: list[Counter[str]] = [found.context.reads.copy() for found in packed]
        # Whether the module has read it, and then whether gradients were enabled; None for a call past the module.
        self.is_read = False
        self.has_graph: bool | None = None
        self._num_reads = self._count_reads(batch)
        self._batch = batch
        self._weak: weakref.ref[Any] | None = None

    @property
    def batch(self) -> Any:
        """The batch; None if it is no longer referenced."""
        return self._batch if self._weak is None else self._weak()

    def loosen(self) -> None:
        """Keep the batch only as long as the loop does."""
        self._batch, self._weak = None, weakref.ref(self._batch)

    def note_call(self, *, has_graph: bool | None) -> bool:
        """Return whether the last call read this batch, and record it; a batch that is not packed is read by any call.

        Args:
            has_graph: Whether gradients were enabled in the call; None if the module was not called.
        """
        batch = self.batch
        num_reads = self._count_reads(batch)
        is_read = num_reads > self._num_reads if self.is_packed else has_graph is not None
        self._num_reads = num_reads
        if is_read:
            self.is_read = True
            self._batch, self._weak = batch, None
            self.has_graph = has_graph if not self.has_graph else True
        return is_read

    @staticmethod
    def _count_reads(batch: Any) -> int:
        return sum(found.context.reads.total() for found in find_packed_batches(batch))


class HandedBatches:
    """The batches that the loop has and has not trained yet, in their order.

    A loop may ask for later batches before it trains one: to see which is the last, or for all of a window.
    """

    def __init__(self) -> None:
        self._entries: list[Handed] = []
        self._call: bool | None = None
        # Whether the last call read no batch, and whether one with gradients did since the last backward.
        self._has_unread_call = self._has_unread_graph = False

    def add(self, batch: Any, *, awaits_backward: bool) -> Handed:
        """Add a batch that a loader hands out."""
        self.settle()
        self._has_unread_call = False
        self._entries = [
            each for each in self._entries if each.batch is not None and (each.awaits_backward or not each.is_read)
        ]
        entry = Handed(batch, awaits_backward=awaits_backward)
        self._entries.append(entry)
        return entry

    def begin_call(self, *, has_graph: bool) -> None:
        """Note that the module is called."""
        self.settle()
        self._call = has_graph

    def settle(self) -> None:
        """Find the batches that the last call has read."""
        call, self._call = self._call, None
        is_read = [each.note_call(has_graph=call) for each in self._entries]
        if call is not None:
            self._has_unread_call = bool(is_read) and not any(is_read)
            self._has_unread_graph |= call and self._has_unread_call

    def finish(self, entry: Handed) -> tuple[bool, bool]:
        """Return whether a batch whose successor is asked for has ended without a backward, and whether a call of the
        module should have read it.
        """
        self.settle()
        if entry not in self._entries or (entry.is_read and entry.has_graph and entry.awaits_backward):
            return False, False
        if not entry.is_read and not self._has_unread_call and isinstance(entry.batch, PackedBatch):
            entry.loosen()
            return False, False
        self._entries.remove(entry)
        return True, self._has_unread_call or entry.is_read

    def take(self) -> list[Handed]:
        """Return the batches that a backward trains, which are handed no longer: those that were read with gradients
        enabled, or, if there is none or another call read none, the last one.
        """
        self.settle()
        trained = [each for each in self._entries if each.is_read and each.has_graph is not False]
        left = [each for each in self._entries if not each.is_read and each.batch is not None]
        if left and (not trained or self._has_unread_graph):
            trained, left = left[-1:], left[:-1]
        # A validation between the forward and the backward may have left one.
        trained = [each for each in trained if each.awaits_backward] or trained
        self._entries = left
        self._has_unread_call = self._has_unread_graph = False
        return trained

    def clear(self) -> None:
        """Forget all batches."""
        self._entries, self._call = [], None
        self._has_unread_call = self._has_unread_graph = False
