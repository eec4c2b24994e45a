"""Copy the documents of a pack into static memory with room for more tokens and documents.

Axes: T tokens of the memory, S documents of the memory (S1 = S + 1 offsets).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lightning_fastft.core.errors import ShapeError
from lightning_fastft.packing.context_content import split_pad_tokens

if TYPE_CHECKING:
    from lightning_fastft.packing.context import BatchContext


def load_documents(memory: BatchContext, other: BatchContext) -> list[int]:
    """Write offsets, documents and positions of another pack into the memory of a recordable context.

    Rows behind its tokens become documents of at most ``memory.max_length``.

    Returns:
        Lengths of the documents behind its tokens.

    Raises:
        ShapeError: The other pack exceeds the limits of the memory, or its attention is not causal.

    Cost:
        Four small launches, with rows behind the tokens nine; no host sync.
    """
    further = split_pad_tokens(memory.num_tokens - other.num_tokens, longest=memory.max_length)
    is_too_large = other.num_documents + len(further) > memory.num_documents or other.max_length > memory.max_length
    if other.num_tokens > memory.num_tokens or is_too_large or other.causal_obstacle:
        raise ShapeError(
            f"The pack has {other.num_tokens} tokens, {other.num_documents} documents, {len(further)} behind its tokens"
            f" and a longest document of {other.max_length}. This recordable context takes at most {memory.num_tokens} "
            f"tokens, {memory.num_documents} documents in all and a longest document of {memory.max_length}."
        )
    # Write through ``.data``: autograd saved these tensors at recording time and must read the new values.
    start_S1, document_T, position_T = memory.start_S1.data, memory.document_T.data, memory.position_T.data
    num_tokens, num_documents, max_length = other.num_tokens, other.num_documents, memory.max_length
    start_S1[: num_documents + 1].copy_(other.start_S1)
    start_S1[num_documents + 1 :].fill_(memory.num_tokens)
    document_T[:num_tokens].copy_(other.document_T)
    position_T[:num_tokens].copy_(other.position_T)
    if further:
        place = torch.arange(memory.num_tokens - num_tokens, device=memory.device)
        document_T[num_tokens:] = place // max_length + num_documents
        position_T[num_tokens:] = place % max_length
        start_S1[num_documents + 1 : num_documents + len(further)] = place[max_length::max_length] + num_tokens
    return further
