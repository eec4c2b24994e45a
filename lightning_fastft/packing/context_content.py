"""Check the metadata of a packed batch before a context is built from it, and find its labelled rows.

Axes: T tokens of the pack, S documents, L labelled rows, R labelled rows padded to a bucket.
"""

from __future__ import annotations

import torch

from lightning_fastft.core.errors import OptionError, ShapeError
from lightning_fastft.packing.document import IGNORED_LABEL

# Rows passed to the loss are padded to a multiple of this, so that the allocator sees few different sizes.
LABELLED_ROW_BUCKET = 128


def check_content(*, length_S: torch.Tensor, label_T: torch.Tensor, num_pad_tokens: int, num_items: float) -> None:
    """Raise on metadata that would cause NaN, attention across documents or an illegal memory access in a kernel.

    Raises:
        ShapeError: Shapes, lengths or labels do not fit each other.
        OptionError: num_items is not above 0.
    """
    if label_T.ndim != 1 or label_T.dtype != torch.int64 or label_T.device.type != "cpu":
        raise ShapeError(
            f"label_T must be a 1-D int64 tensor on the CPU, got shape {tuple(label_T.shape)}, {label_T.dtype}, "
            f"{label_T.device}."
        )
    if length_S.ndim != 1 or length_S.numel() == 0:
        raise ShapeError(f"lengths must be 1-D with at least one document, got shape {tuple(length_S.shape)}.")
    if int(length_S.min()) < 1:
        raise ShapeError(
            f"Every document needs at least one token; document {int(length_S.argmin())} has {int(length_S.min())}."
        )
    if int(length_S.sum()) != label_T.numel():
        raise ShapeError(
            f"lengths sum to {int(length_S.sum())} tokens, but label_T has {label_T.numel()}. They must be equal."
        )
    end_S = length_S.cumsum(0)
    start_S = end_S - length_S
    crossing = torch.nonzero(label_T[start_S] != IGNORED_LABEL).flatten()
    if crossing.numel():
        raise ShapeError(
            f"The first token of document {int(crossing[0])} is labelled, so it would be predicted from another "
            "document. Set its label to -100."
        )
    num_real_tokens = label_T.numel() - num_pad_tokens
    if num_pad_tokens and not (num_pad_tokens > 0 and bool((start_S == num_real_tokens).any())):
        raise ShapeError(f"The pad tail of {num_pad_tokens} tokens must begin with a document of its own.")
    if num_pad_tokens and bool((label_T[num_real_tokens:] != IGNORED_LABEL).any()):
        raise ShapeError("The pad tail has trained labels. Set them to -100.")
    if not 0 < num_items < float("inf"):
        raise OptionError(f"num_items must be a finite number above 0, got {num_items}.")


def find_labelled_rows(label_T: torch.Tensor) -> tuple[int, torch.Tensor, torch.Tensor]:
    """Return the number of rows that predict a label, those rows and their labels, both padded to a bucket."""
    row_L = torch.nonzero(label_T[1:] != IGNORED_LABEL).flatten()
    num_padding_rows = -row_L.numel() % LABELLED_ROW_BUCKET
    row_R = torch.nn.functional.pad(row_L, (0, num_padding_rows))
    target_R = torch.nn.functional.pad(label_T[row_L + 1], (0, num_padding_rows), value=IGNORED_LABEL)
    return row_L.numel(), row_R, target_R


def split_pad_tokens(num_pad_tokens: int, *, longest: int) -> list[int]:
    """Return the lengths of the documents that pad tokens become, none longer than the longest."""
    if num_pad_tokens <= 0:
        return []
    whole, rest = divmod(num_pad_tokens, longest)
    return [longest] * whole + [rest] * (rest > 0)
