"""Choose which recordings serve a pack, so that few of them serve packs of any length.

A pack runs from the smallest bucket that holds its tokens, its documents and its longest document. The rows behind its
tokens are zeros in documents of their own, and their gradients are zero.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

import torch

from lightning_fastft.kernels.sizes import ceil_div, next_power_of_2
from lightning_fastft.packing.context import BatchContext

if TYPE_CHECKING:
    from lightning_fastft.graphs.recordings import Recording

# If packs differ in length, tokens of a bucket are a multiple of this share of the next power of two.
_TOKEN_STEPS = 8
# The number of documents of a bucket is a multiple of this.
_DOCUMENT_STEP = 16
# A bucket takes a recording of every layer, about the time of two steps.
_MOST_BUCKETS = 5
# Packs of a number of tokens, rounded up, before they run from recordings of their own.
_NUM_FREQUENT = 16


class PackSize(NamedTuple):
    """The bounds of the packs that a bucket holds.

    Args:
        num_tokens: Tokens of the recorded layers.
        num_documents: Largest number of documents, those of the rows behind the tokens included.
        max_length: Tokens of the longest document.
    """

    num_tokens: int
    num_documents: int
    max_length: int

    def holds(self, context: BatchContext) -> bool:
        """Return whether a pack can run from recordings of this size."""
        num_further = self.num_tokens - context.num_tokens
        return (
            num_further >= 0
            and context.max_length <= self.max_length
            and context.num_documents + ceil_div(num_further, self.max_length) <= self.num_documents
        )


class PackBucket:
    """Recordings for packs up to one size."""

    def __init__(self, context: BatchContext, size: PackSize, *, chunk_size: int | None) -> None:
        self.size = size
        self.context = context.recordable(
            num_tokens=size.num_tokens,
            num_documents=size.num_documents,
            max_length=size.max_length,
            chunk_size=chunk_size,
        )
        self.recordings: dict[int, Recording] = {}
        self.num_recordings: Counter[int] = Counter()
        # Static copies of the tensors that layers take besides hidden states and the context.
        self._inputs: list[StaticInput] = []

    def input_for(self, tensor: torch.Tensor, *, num_tokens: int) -> StaticInput:
        """Return the static copy of a tensor of a pack of num_tokens, shared by all layers that take it."""
        for found in self._inputs:
            if found.source is tensor:
                return found
        self._inputs.append(StaticInput(tensor, num_tokens=num_tokens, room=self.size.num_tokens))
        return self._inputs[-1]


class PackBuckets:
    """The buckets of the packs of a run; at most ``_MOST_BUCKETS``, each of another number of tokens.

    If no bucket holds a pack, the next one holds every pack so far. One of fewer tokens is added for frequent packs.
    Documents alone add none for fewer of them, which would gain little; for more of them, the next one replaces the one
    of as many tokens. If packs outgrow the tokens of all buckets, it replaces all others, so the memory is that of the
    largest bucket.
    """

    def __init__(self) -> None:
        self.buckets: list[PackBucket] = []
        # By tokens, rounded up: the number of packs, and the size that holds them.
        self._counts: Counter[int] = Counter()
        self._bounds: dict[int, PackSize] = {}
        self._shortest_pack = self.longest_pack = 0

    def note(self, context: BatchContext) -> None:
        """Count a pack."""
        num_tokens = context.num_tokens
        self._shortest_pack = min(self._shortest_pack or num_tokens, num_tokens)
        self.longest_pack = max(self.longest_pack, num_tokens)
        own = _size_of(context, self._round_tokens(num_tokens))
        self._counts[own.num_tokens] += 1
        self._bounds[own.num_tokens] = _join(own, self._bounds.get(own.num_tokens, own))

    def find(self, context: BatchContext) -> PackBucket | None:
        """Return the smallest bucket that holds a pack; None if a bucket is to be added."""
        found = self._smallest(context)
        if found is None or len(self.buckets) == _MOST_BUCKETS:
            return found
        num_tokens = self._round_tokens(context.num_tokens)
        is_frequent = self._counts[num_tokens] >= _NUM_FREQUENT and num_tokens < found.size.num_tokens
        return None if is_frequent else found

    def next_size(self, context: BatchContext) -> PackSize:
        """Return the size of the bucket to be added for a pack."""
        if self._smallest(context) is not None:
            return self._bounds[self._round_tokens(context.num_tokens)]
        num_tokens = self._most_tokens()
        if self.longest_pack > num_tokens:
            num_tokens = self._round_tokens(self.longest_pack)
        # With more tokens than its own bucket, a pack has more rows, and so documents, behind its tokens.
        return _join(_size_of(context, num_tokens), *self._bounds.values())._replace(num_tokens=num_tokens)

    def add(self, context: BatchContext, *, chunk_size: int | None) -> PackBucket:
        """Return a new bucket with this pack loaded."""
        size = self.next_size(context)
        if size.num_tokens > self._most_tokens():
            self.buckets.clear()
        # More documents or longer ones: the new bucket holds the packs of the earlier one.
        earlier = [bucket for bucket in self.buckets if bucket.size.num_tokens == size.num_tokens]
        size = _join(size, *(bucket.size for bucket in earlier))
        self.buckets = [bucket for bucket in self.buckets if bucket not in earlier]
        self.buckets.append(PackBucket(context, size, chunk_size=chunk_size))
        return self.buckets[-1]

    def _smallest(self, context: BatchContext) -> PackBucket | None:
        holding = (bucket for bucket in self.buckets if bucket.size.holds(context))
        return min(holding, key=lambda bucket: bucket.size, default=None)

    def _most_tokens(self) -> int:
        return max((bucket.size.num_tokens for bucket in self.buckets), default=0)

    def _round_tokens(self, num_tokens: int) -> int:
        """Return the tokens of the bucket of a pack; packs that all have one length run without further rows."""
        if self._shortest_pack == self.longest_pack:
            return num_tokens
        step = max(1, next_power_of_2(num_tokens) // _TOKEN_STEPS)
        return ceil_div(num_tokens, step) * step


class StaticInput:
    """A static copy of a tensor that layers take.

    Args:
        tensor: The tensor of the first pack. Its first axis with as many entries as the pack has tokens is the axis of
            the tokens.
        num_tokens: Tokens of that pack.
        room: Tokens of the copy.
    """

    def __init__(self, tensor: torch.Tensor, *, num_tokens: int, room: int) -> None:
        shape = list(tensor.shape)
        self._axis = shape.index(num_tokens) if num_tokens in shape else None
        if self._axis is not None:
            shape[self._axis] = room
        self.memory = tensor.detach().new_empty(shape)
        self.source, self._version = tensor, tensor._version
        load_rows(self.memory, tensor.detach(), axis=self._axis)

    def fits(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor differs from the first one in the number of tokens only."""
        sizes = zip(tensor.shape, self.memory.shape)
        return tensor.ndim == self.memory.ndim and all(
            size <= room if axis == self._axis else size == room for axis, (size, room) in enumerate(sizes)
        )

    def load(self, tensor: torch.Tensor) -> None:
        """Copy a tensor of the pack that runs; all layers take the same tensors, so only the first one copies."""
        if self.source is not tensor or self._version != tensor._version:
            load_rows(self.memory, tensor, axis=self._axis)
            self.source, self._version = tensor, tensor._version


def load_rows(memory: torch.Tensor, tensor: torch.Tensor, *, axis: int | None = 1) -> None:
    """Copy a tensor into static memory with more entries along an axis, and set the further ones to zero.

    NaN of an earlier pack must not stay behind the tokens: the sums of gradients read those rows, with zeros.
    """
    if axis is None or tensor.shape[axis] == memory.shape[axis]:
        memory.data.copy_(tensor)
        return
    num_tokens = tensor.shape[axis]
    memory.data.narrow(axis, 0, num_tokens).copy_(tensor)
    memory.data.narrow(axis, num_tokens, memory.shape[axis] - num_tokens).zero_()


def _size_of(context: BatchContext, num_tokens: int) -> PackSize:
    """Return the smallest bounds with so many tokens that hold a pack."""
    max_length = min(next_power_of_2(context.max_length), num_tokens)
    num_documents = context.num_documents + ceil_div(num_tokens - context.num_tokens, max_length)
    return PackSize(num_tokens, ceil_div(num_documents, _DOCUMENT_STEP) * _DOCUMENT_STEP, max_length)


def _join(*sizes: PackSize) -> PackSize:
    """Return the largest of every bound."""
    return PackSize(*map(max, zip(*sizes)))
