"""NEFTune: uniform noise on the embeddings in training, scaled by the length of each document of a pack."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from lightning_fastft.packing.collate import PackedBatch


@contextmanager
def embedding_noise(
    embedding: nn.Module, batch: PackedBatch | Mapping[str, Any], *, alpha: float, seeds: tuple[int, ...]
) -> Iterator[None]:
    """Add noise to the output of an embedding inside a block.

    Each element gets ``alpha / sqrt(L * D)`` times a number drawn from [-1, 1), with L tokens in the document and D
    columns. L is the document's own length, so a document has the same noise in a pack as alone. The draws follow the
    seeds alone: a resumed run draws the same noise, and the global generators do not change. Alpha, above 0, is its
    size. The batch of the forward in the block gives L; the seeds are that of the run and numbers that differ between
    micro-batches and ranks.

    Cost:
        A draw and two passes over the embeddings; no host sync.

    Source:
        NEFTune, arXiv 2310.05914.
    """
    seed = int(np.random.SeedSequence(seeds).generate_state(1, np.uint64)[0])
    generator = torch.Generator(device=batch["input_ids"].device).manual_seed(seed)

    def add(module: nn.Module, args: Any, rows: torch.Tensor) -> torch.Tensor:
        noise = torch.empty_like(rows).uniform_(-1.0, 1.0, generator=generator)
        size = alpha * (_lengths(batch, rows) * rows.shape[-1]).rsqrt()
        return rows + noise * size.unsqueeze(-1).to(rows.dtype)

    handle = embedding.register_forward_hook(add)
    try:
        yield
    finally:
        handle.remove()


def _lengths(batch: PackedBatch | Mapping[str, Any], rows: torch.Tensor) -> torch.Tensor:
    """Return the length of the document of each row in fp32, without the axis D."""
    # With attention="one_by_one" each call has the rows of one document.
    if isinstance(batch, PackedBatch) and rows.shape[:-1].numel() == batch.context.num_tokens:
        length_S = batch.context.start_S1.diff().float()
        return length_S[batch.context.document_T.long()].view(rows.shape[:-1])
    mask = None if isinstance(batch, PackedBatch) else batch.get("attention_mask")
    if mask is None:
        return rows.new_full(rows.shape[:-1], float(rows.shape[-2]), dtype=torch.float32)
    return mask.sum(-1, keepdim=True).float().expand(rows.shape[:-1])
