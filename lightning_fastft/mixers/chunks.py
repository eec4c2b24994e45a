"""The chunks of a pack in which kernels of recurrent mixers compute; a chunk ends where its document ends.

Axes: S documents, N chunks of documents.
"""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

import torch

from lightning_fastft.kernels.chunk_gradients.reference import CHUNK
from lightning_fastft.packing.context import BatchContext


class ChunkPlan(NamedTuple):
    """Where documents and their chunks of 64 tokens are in a pack.

    Args:
        start_S1: First token of each document, and the number of tokens. Shape (S + 1,), int32.
        chunk_N2: Document, and place in it, of each chunk. Shape (N, 2), int32.
        first_chunk_S1: First chunk of each document, and N. Shape (S + 1,), int32.
    """

    start_S1: torch.Tensor
    chunk_N2: torch.Tensor
    first_chunk_S1: torch.Tensor


def chunk_plan(context: BatchContext) -> ChunkPlan:
    """Return the documents and chunks of a pack, on the context's device.

    Cost:
        Built on the host once per batch and copied without a host sync.
    """

    def build() -> ChunkPlan:
        first = [0, *accumulate(-(-length // CHUNK) for length in context.lengths)]
        first_chunk_S1 = torch.tensor(first, dtype=torch.int32).to(context.device, non_blocking=True)
        return ChunkPlan(context.start_S1, chunk_indices(context), first_chunk_S1)

    return context.once("chunk_plan", (context.device, CHUNK), build)


def chunk_indices(context: BatchContext) -> torch.Tensor:
    """Return (document, chunk inside it) of each chunk of the pack, shape (N, 2), int32, on the context's device.

    Cost:
        Built on the host once per batch and copied without a host sync.
    """

    def build() -> torch.Tensor:
        chunks = [
            (document, chunk) for document, length in enumerate(context.lengths) for chunk in range(-(-length // CHUNK))
        ]
        # The source is pageable and staged by the driver, so the host does not wait.
        return torch.tensor(chunks, dtype=torch.int32).to(context.device, non_blocking=True)

    return context.once("chunk_indices", (context.device, CHUNK), build)
