"""Attention masks of a pack: dense, dense by blocks of queries, and the block mask of FlexAttention.

Axes: T tokens of the pack, Q blocks of tokens, R queries of a block, K keys that a block sees.

Documents are contiguous, so the keys that a token sees are one range of its own document and, where the document
continues a prefix, one range of the prefix. The range of the own document ends with the token, or with the span of
tokens that see each other in both directions (packing/spans.py).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch

from lightning_fastft.packing.spans import BidirectionalSpans

BLOCK_SIZE = 128
# The first key of a block of queries is a multiple of this: kernels copy a mask whose rows are not aligned.
KEY_STEP = 16


def build_mask_blocks(
    position_T: torch.Tensor,
    prefix_range_2T: torch.Tensor | None,
    *,
    lengths: Sequence[int],
    prefixes: Sequence[int],
    spans: BidirectionalSpans | None = None,
    window: int | None,
    dtype: torch.dtype,
    num_rows: int,
) -> list[tuple[slice, slice, torch.Tensor]]:
    """Return the masks of ``BatchContext.mask_blocks``."""
    starts = list(accumulate(lengths[:-1], initial=0))
    ranges = list_block_ranges(
        position_T.numel(), starts=starts, prefixes=prefixes, spans=spans, window=window, num_rows=num_rows
    )
    return [
        (
            queries,
            keys,
            build_dense_mask(
                position_T, prefix_range_2T, spans=spans, window=window, dtype=dtype, queries=queries, keys=keys
            ),
        )
        for queries, keys in ranges
    ]


def list_block_ranges(
    num_tokens: int,
    *,
    starts: Sequence[int],
    prefixes: Sequence[int],
    spans: BidirectionalSpans | None = None,
    window: int | None,
    num_rows: int,
) -> list[tuple[slice, slice]]:
    """Return the queries and the keys of each block of ``build_mask_blocks``."""
    ranges = []
    for begin in range(0, num_tokens, num_rows):
        queries = slice(begin, min(begin + num_rows, num_tokens))
        documents = range(bisect_right(starts, begin) - 1, bisect_right(starts, queries.stop - 1))
        first = min(starts[document if prefixes[document] < 0 else prefixes[document]] for document in documents)
        if window is not None and all(prefixes[document] < 0 for document in documents):
            first = max(first, begin - (window - 1))
        end = queries.stop if spans is None else _up_to_step(spans.end_of_keys(queries.stop), num_tokens)
        ranges.append((queries, slice(first // KEY_STEP * KEY_STEP, end)))
    return ranges


def _up_to_step(end: int, num_tokens: int) -> int:
    return min(-(-end // KEY_STEP) * KEY_STEP, num_tokens)


def build_dense_mask(
    position_T: torch.Tensor,
    prefix_range_2T: torch.Tensor | None,
    *,
    spans: BidirectionalSpans | None = None,
    window: int | None,
    dtype: torch.dtype,
    queries: slice = slice(None),
    keys: slice = slice(None),
) -> torch.Tensor:
    """Return the mask of ``BatchContext.dense_mask``, shape (1, 1, T, T), or a part of it.

    Args:
        position_T: Position of each token in its document, after the prefix if there is one, int64.
        prefix_range_2T: ``PrefixKeys.range_2T``; None if no document continues a prefix.
        spans: Tokens that see later ones; None if no token does.
        window: Keys a query sees, itself included; None for all.
        dtype: torch.bool or a floating dtype.
        queries: Rows of the mask to build.
        keys: Columns of the mask to build.
    """
    index_T = torch.arange(position_T.numel(), device=position_T.device)
    first_T, begin_T, end_T = _seen_ranges(position_T, prefix_range_2T, window=window)
    last_T = index_T if spans is None else spans.last_T
    key_1K = index_T[None, keys]
    seen_RK = (key_1K >= first_T[queries, None]) & (key_1K <= last_T[queries, None])
    if begin_T is not None and end_T is not None:
        seen_RK |= (key_1K >= begin_T[queries, None]) & (key_1K < end_T[queries, None])
    if dtype is not torch.bool:
        lowest = torch.full((), torch.finfo(dtype).min, dtype=dtype, device=position_T.device)
        return torch.where(seen_RK, lowest.new_zeros(()), lowest)[None, None]
    return seen_RK[None, None]


def build_block_mask(
    position_T: torch.Tensor,
    prefix_range_2T: torch.Tensor | None,
    *,
    spans: BidirectionalSpans | None = None,
    document_T: torch.Tensor,
    window: int | None,
) -> Any:
    """Return the mask of ``BatchContext.block_mask``.

    Args:
        position_T: As ``build_dense_mask``.
        prefix_range_2T: As ``build_dense_mask``.
        spans: As ``build_dense_mask``.
        document_T: Document of each token, ascending.
        window: Keys a query sees, itself included; None for all.
    """
    from torch.nn.attention.flex_attention import BlockMask

    num_tokens = position_T.numel()
    num_blocks = -(-num_tokens // BLOCK_SIZE)
    begin_Q = torch.arange(num_blocks, device=position_T.device) * BLOCK_SIZE
    end_Q = (begin_Q + BLOCK_SIZE - 1).clamp(max=num_tokens - 1)
    first_document_Q, last_document_Q = document_T[begin_Q], document_T[end_Q]
    query_begin, query_end = begin_Q[:, None], end_Q[:, None]
    key_begin, key_end = begin_Q[None, :], end_Q[None, :]

    # Where a block ends in a span, its last token sees the span's end, and no other token of it sees further.
    last_key = query_end if spans is None else spans.last_T[end_Q][:, None]
    touched_QQ = (key_begin <= last_key) & (last_document_Q[None, :] >= first_document_Q[:, None])
    full_QQ = (key_end <= query_begin) & (first_document_Q[None, :] == last_document_Q[:, None])
    # A last block that reaches past T is never full, so that the kernel applies the mask there.
    full_QQ &= (query_begin + BLOCK_SIZE <= num_tokens) & (key_begin + BLOCK_SIZE <= num_tokens)
    if window is not None:
        touched_QQ &= query_begin - key_end < window
        full_QQ &= query_end - key_begin < window
    first_T, prefix_begin_T, prefix_end_T = _seen_ranges(position_T, prefix_range_2T, window=window)
    if prefix_begin_T is not None and prefix_end_T is not None:
        touched_TQ, full_TQ = _blocks_in_ranges(prefix_begin_T, prefix_end_T, num_blocks=num_blocks)
        touched_QQ = touched_QQ | touched_TQ.view(num_blocks, BLOCK_SIZE, -1).any(1)
        full_QQ = full_QQ | full_TQ.view(num_blocks, BLOCK_SIZE, -1).all(1)
    partial_QQ = touched_QQ & ~full_QQ

    def mask_mod(batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        last_key = query if spans is None else spans.last_T[query]
        is_own = (key >= first_T[query]) & (key <= last_key)
        if prefix_begin_T is None or prefix_end_T is None:
            return is_own
        return is_own | ((key >= prefix_begin_T[query]) & (key < prefix_end_T[query]))

    return BlockMask.from_kv_blocks(
        *_ordered_blocks(partial_QQ),
        *_ordered_blocks(full_QQ),
        BLOCK_SIZE=BLOCK_SIZE,
        mask_mod=mask_mod,
        seq_lengths=(num_tokens, num_tokens),
    )


def _seen_ranges(
    position_T: torch.Tensor, prefix_range_2T: torch.Tensor | None, *, window: int | None
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return the first row that each token sees of its own document, shape (T,), and the first row of its prefix
    and one past the last, or None and None.
    """
    index_T = torch.arange(position_T.numel(), device=position_T.device)
    # "Same document and not later" is "between the document's start and the query".
    first_T = index_T - position_T
    if prefix_range_2T is None:
        return first_T if window is None else torch.maximum(first_T, index_T - (window - 1)), None, None
    begin_T, end_T = prefix_range_2T
    first_T = first_T + (end_T - begin_T)
    if window is not None:
        first_T = torch.maximum(first_T, index_T - (window - 1))
        begin_T = torch.maximum(begin_T, begin_T + position_T - (window - 1))
    return first_T, begin_T, end_T


def _blocks_in_ranges(
    begin_T: torch.Tensor, end_T: torch.Tensor, *, num_blocks: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which key blocks each query's range touches, and which it holds whole, both (whole blocks of T, blocks).

    Rows that pad the last query block have an empty range.
    """
    padding = num_blocks * BLOCK_SIZE - begin_T.shape[0]
    begin_T1, end_T1 = (torch.nn.functional.pad(x_T, (0, padding))[:, None] for x_T in (begin_T, end_T))
    block_begin_Q = torch.arange(num_blocks, device=begin_T.device) * BLOCK_SIZE
    block_end_Q = block_begin_Q + BLOCK_SIZE
    touched_TQ = (begin_T1 < block_end_Q) & (end_T1 > block_begin_Q) & (begin_T1 < end_T1)
    return touched_TQ, (begin_T1 <= block_begin_Q) & (end_T1 >= block_end_Q)


def _ordered_blocks(chosen_QQ: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the number of chosen key blocks per query block, and all key block indices with the chosen ones first."""
    count_Q = chosen_QQ.sum(dim=1, dtype=torch.int32)
    order_QQ = torch.argsort(chosen_QQ.to(torch.int32), dim=1, descending=True, stable=True).to(torch.int32)
    return count_Q[None, None], order_QQ[None, None].contiguous()
