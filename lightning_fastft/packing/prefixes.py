"""Prefixes: documents of a pack that continue an earlier document, and the keys that their tokens see.

Axes: T tokens of the pack, S documents (S1 = S + 1 offsets), N keys of all documents, K readers of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from lightning_fastft.core.errors import ShapeError


class PrefixKeys(NamedTuple):
    """Keys of a pack whose documents continue prefixes: each document's keys are its prefix's and then its own.

    Args:
        range_2T: First row of the prefix that each token sees, and one past its last, shape (2, T), int64; 0 and 0 for
            none.
        row_N: Row of the pack of each key, shape (N,), int64.
        place_TK: Places of each row among the keys, shape (T, K), int64, for at most K readers; N where there are
            fewer.
        start_S1: Offset of each document's keys, and N, shape (S + 1,), int32.
    """

    range_2T: torch.Tensor
    row_N: torch.Tensor
    place_TK: torch.Tensor
    start_S1: torch.Tensor


class VarlenArguments(NamedTuple):
    """Arguments of a variable-length attention kernel: offsets on the device, the longest document on the host.

    If documents continue prefixes (``PrefixKeys``), keys have offsets of their own.
    """

    start_S1: torch.Tensor
    max_length: int
    key_start_S1: torch.Tensor
    max_key_length: int


def check_prefixes(prefixes: Sequence[int] | None, *, num_documents: int) -> torch.Tensor:
    """Return the prefix of each document, -1 for none, shape (S,), int64."""
    prefix_S = torch.full((num_documents,), -1) if prefixes is None else torch.as_tensor(prefixes, dtype=torch.int64)
    if prefix_S.shape != (num_documents,):
        raise ShapeError(f"prefixes has shape {tuple(prefix_S.shape)}; {num_documents} documents need one entry each.")
    wrong_S = (prefix_S < -1) | (prefix_S >= torch.arange(num_documents))
    wrong_S |= (prefix_S >= 0) & (prefix_S[prefix_S.clamp(min=0, max=max(0, num_documents - 1))] >= 0)
    if bool(wrong_S.any()):
        number = int(wrong_S.nonzero()[0])
        raise ShapeError(
            f"Document {number} continues document {int(prefix_S[number])}. A prefix is an earlier document of the "
            "pack that continues none itself; -1 means none."
        )
    return prefix_S


def list_keys(start_S1: torch.Tensor, *, prefix_S: torch.Tensor, document_T: torch.Tensor) -> PrefixKeys:
    """Return the keys of each document: the rows of its prefix, then its own."""
    length_S = start_S1.diff()
    begin_S, end_S = (torch.where(prefix_S >= 0, x_S1[prefix_S.clamp(min=0)], 0) for x_S1 in (start_S1, start_S1[1:]))
    spans = [
        (begin, end)
        for prefix_begin, prefix_end, own_begin, own_end in zip(
            begin_S.tolist(), end_S.tolist(), start_S1[:-1].tolist(), start_S1[1:].tolist()
        )
        for begin, end in ((prefix_begin, prefix_end), (own_begin, own_end))
    ]
    row_N = torch.cat([torch.arange(begin, end) for begin, end in spans])
    key_start_S1 = torch.nn.functional.pad((length_S + end_S - begin_S).cumsum(0), (1, 0))
    # The keys of a row, found by sorting, and numbered within the row.
    place_N = row_N.argsort(stable=True)
    num_places_T = row_N.bincount(minlength=document_T.numel())
    first_T = num_places_T.cumsum(0) - num_places_T
    place_TK = torch.full((document_T.numel(), int(num_places_T.max())), row_N.numel())
    sorted_N = row_N[place_N]
    place_TK[sorted_N, torch.arange(row_N.numel()) - first_T[sorted_N]] = place_N
    return PrefixKeys(torch.stack([begin_S, end_S])[:, document_T], row_N, place_TK, key_start_S1.to(torch.int32))
