"""Chunks of a pack for the kernels of recurrent mixers; no chunk spans two documents.

Axes: S documents (S1 = S + 1 offsets), N chunks of documents.
"""

from __future__ import annotations

from itertools import accumulate

import torch

from lightning_fastft.kernels.chunk_gradients.reference import CHUNK
from lightning_fastft.kernels.state_scan.reference import Chunks
from lightning_fastft.packing.context import BatchContext


def pack_chunks(context: BatchContext) -> Chunks:
    """Return the documents and chunks of a pack, on the context's device.

    Cost:
        Built on the host once per batch and copied without a host sync.
    """

    def build() -> Chunks:
        first = [0, *accumulate(-(-length // CHUNK) for length in context.lengths)]
        first_S1 = torch.tensor(first, dtype=torch.int32).to(context.device, non_blocking=True)
        return Chunks(context.start_S1, first_S1, chunk_indices(context), CHUNK)

    return context.once("chunks", (context.device, CHUNK), build)


def chunk_indices(context: BatchContext) -> torch.Tensor:
    """Return (document, index in the document) of each chunk, shape (N, 2), int32, on the context's device.

    Cost:
        Built on the host once per batch and copied without a host sync.
    """

    def build() -> torch.Tensor:
        chunks = [
            (document, chunk) for document, length in enumerate(context.lengths) for chunk in range(-(-length // CHUNK))
        ]
        # The source is pageable memory, which the driver stages, so this is no host sync.
        return torch.tensor(chunks, dtype=torch.int32).to(context.device, non_blocking=True)

    return context.once("chunk_indices", (context.device, CHUNK), build)
