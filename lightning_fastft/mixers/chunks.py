"""The chunks of a pack in which kernels of recurrent mixers compute; a chunk ends where its document ends.

Axes: N chunks of documents.
"""

from __future__ import annotations

import torch

from lightning_fastft.packing.context import BatchContext

# Tokens of a chunk, in the convolution and in the delta rules of fla-core.
CHUNK = 64


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
