"""Chunks of a pack, for the kernels of recurrent mixers; no chunk spans two documents.

Axes: T tokens of the pack, S documents (S1 = S + 1 offsets), C chunks of documents.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch


class Chunks(NamedTuple):
    """Documents of a pack and their chunks.

    Args:
        start_S1: Offsets of the documents in tokens. Shape (S+1,), int32.
        first_S1: Number of chunks before each document; the last entry is the number of all chunks. Shape (S+1,),
            int32.
        index_C2: Document of each chunk, and index of the chunk in it. Shape (C, 2), int32.
        size: Tokens of a chunk; the last chunk of a document may have fewer.
    """

    start_S1: torch.Tensor
    first_S1: torch.Tensor
    index_C2: torch.Tensor
    size: int


def build_chunks(lengths: Sequence[int], start_S1: torch.Tensor, size: int) -> Chunks:
    """Return the chunks of documents, on the device of start_S1, without a host sync."""
    counts = [-(-length // size) for length in lengths]
    index = [(document, chunk) for document, count in enumerate(counts) for chunk in range(count)]
    # The sources are pageable memory, which the driver stages, so this is not a host sync.
    first_S1, index_C2 = (
        torch.tensor(values, dtype=torch.int32).to(start_S1.device, non_blocking=True)
        for values in ([0, *accumulate(counts)], index)
    )
    return Chunks(start_S1, first_S1, index_C2, size)


def recordable_chunks(start_S1: torch.Tensor, *, num_tokens: int, size: int) -> Chunks:
    """Return memory for the chunks of any T tokens in up to S documents, for ``load_chunks``; start_S1 is shared."""
    num_documents = start_S1.numel() - 1
    num_chunks = num_tokens // size + num_documents
    return Chunks(start_S1, torch.empty_like(start_S1), start_S1.new_empty(num_chunks, 2), size)


def load_chunks(memory: Chunks, other: Chunks, *, num_tokens: int) -> None:
    """Copy the chunks of another pack of T tokens into memory of ``recordable_chunks``.

    Further documents have no chunk. Further chunks are behind the end of the last document, so they have no token.

    Cost:
        Five small launches; no host sync.
    """
    num_offsets, num_chunks = other.first_S1.numel(), other.index_C2.shape[0]
    first_S1, index_C2 = memory.first_S1.data, memory.index_C2.data
    first_S1[:num_offsets].copy_(other.first_S1)
    first_S1[num_offsets:].fill_(num_chunks)
    index_C2[:num_chunks].copy_(other.index_C2)
    index_C2[num_chunks:, 0].fill_(first_S1.numel() - 2)
    index_C2[num_chunks:, 1].fill_(-(-num_tokens // memory.size))
