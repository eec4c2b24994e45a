"""Gather token rows in expert order, and sum the experts' outputs back per token; both without a graph.

Each is the backward of the other. The gradient of ``gather_rows`` is ``combine_rows`` without weights. The gradient of
``combine_rows`` is ``gather_rows`` times the weights, in the rows that have an expert. Callers implement autograd.

Axes: T tokens of the pack, K experts per token, N routed slots (T * K), E experts, D model width.
"""

from __future__ import annotations

import torch

from lightning_fastft.core.checks import check_int, check_layout
from lightning_fastft.core.errors import ShapeError
from lightning_fastft.kernels.backends import FLOATING, choose_module, must_check, no_graph
from lightning_fastft.kernels.expert_rows import reference

_INDICES = (torch.int32, torch.int64)


def gather_rows(
    x_TD: torch.Tensor,
    slot_N: torch.Tensor,
    *,
    num_experts_per_token: int,
    end_E: torch.Tensor | None = None,
    is_checked: bool = True,
) -> torch.Tensor:
    """Return the row of the token that each routed slot belongs to, bit for bit: ``x_TD[slot_N // K]``.

    A slot outside the tokens gives a row of NaN on CUDA, where an error would need a host sync, and raises elsewhere.

    Args:
        x_TD: Token states. Shape (T, D); bf16, fp16, fp32 or float64; last axis contiguous, any row stride.
        slot_N: Slots (``token * K + choice``) in the output order, as ``ExpertOrder.slot_N``. Shape (N,), int32 or
            int64; any stride.
        num_experts_per_token: K, at least 1.
        end_E: One past the last place of each expert, as ``ExpertOrder.end_E``; int32 or int64. Rows from its last
            entry on hold arbitrary values. None for all rows.
        is_checked: As in ``must_check``.

    Returns:
        y_ND: Shape (N, D), contiguous; dtype and device of x_TD; no gradient.

    Raises:
        OptionError: num_experts_per_token is not allowed.

    Cost:
        N x D values read and written once, in one launch, of the rows before ``end_E[-1]`` if given; no host sync.

    Example:
        >>> x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        >>> gather_rows(x, torch.tensor([3, 0, 1, 2]), num_experts_per_token=2).tolist()
        [[3.0, 4.0], [1.0, 2.0], [1.0, 2.0], [3.0, 4.0]]
    """
    if must_check(is_checked):
        check_layout("x_TD", x_TD, (None, None), dtypes=FLOATING, num_strided=1)
        check_layout("slot_N", slot_N, (None,), dtypes=_INDICES, like=x_TD, num_strided=1)
        check_int("num_experts_per_token", num_experts_per_token, low=1)
        if end_E is not None and not check_layout("end_E", end_E, (None,), dtypes=_INDICES, like=x_TD).shape[0]:
            raise ShapeError("end_E is empty; it needs one entry per expert, at least one.")
    with no_graph():
        return choose_module(reference, x_TD, dtypes=None).gather_rows(
            x_TD, slot_N, num_experts_per_token=num_experts_per_token, end_E=end_E
        )


def combine_rows(
    y_ND: torch.Tensor,
    place_TK: torch.Tensor,
    end_E: torch.Tensor,
    *,
    weight_TK: torch.Tensor | None = None,
    is_checked: bool = True,
) -> torch.Tensor:
    """Return, for each token, the weighted sum of the rows of its routed slots: ``sum over k of weight_TK[t, k] *
    y_ND[place_TK[t, k]]``.

    Terms are added in order from k = 0 to K - 1. Products and sums are fp32 (float64 for float64
    rows), and the result is rounded once to the dtype of y_ND. A place from ``end_E[-1]`` on has no expert: it adds
    exactly 0, and its row and weight may hold NaN.

    Args:
        y_ND: Outputs of the experts, in sorted order. Shape (N, D); bf16, fp16, fp32 or float64; last axis contiguous,
            any row stride.
        place_TK: Place of each slot in the sorted order, as ``ExpertOrder.place_TK``. Shape (T, K) with T * K at
            least N; int32 or int64; any strides.
        end_E: One past the last place of each expert, as ``ExpertOrder.end_E``. Shape (E,), int32 or int64; only its
            last entry is read.
        weight_TK: Routing weights. Shape (T, K); any floating dtype; any strides; None for weights of 1.
        is_checked: As in ``must_check``.

    Returns:
        Shape (T, D), contiguous; dtype and device of y_ND; no gradient.

    Cost:
        Triton: each row of y_ND with an expert is read once, the result written once, in one launch; no atomics, no
            host sync.

    Example:
        >>> y = torch.tensor([[1.0], [10.0], [100.0], [float("nan")]])
        >>> place, end = torch.tensor([[2, 0], [1, 3]]), torch.tensor([1, 3])
        >>> combine_rows(y, place, end, weight_TK=torch.tensor([[0.5, 2.0], [1.0, 1.0]])).tolist()
        [[52.0], [10.0]]
    """
    if must_check(is_checked):
        check_layout("y_ND", y_ND, (None, None), dtypes=FLOATING, num_strided=1)
        check_layout("place_TK", place_TK, (None, None), dtypes=_INDICES, like=y_ND, num_strided=2)
        check_layout("end_E", end_E, (None,), dtypes=_INDICES, like=y_ND, num_strided=1)
        if place_TK.shape[1] < 1 or place_TK.numel() < y_ND.shape[0]:
            raise ShapeError(
                f"place_TK has shape {tuple(place_TK.shape)}, y_ND has {y_ND.shape[0]} rows; place_TK needs K of at "
                "least 1 and a place for every row."
            )
        if end_E.shape[0] < 1:
            raise ShapeError("end_E is empty; it needs one entry per expert, at least one.")
        if weight_TK is not None:
            check_layout("weight_TK", weight_TK, place_TK.shape, dtypes=FLOATING, like=y_ND, num_strided=2)
    with no_graph():
        return choose_module(reference, y_ND, dtypes=None).combine_rows(y_ND, place_TK, end_E, weight_TK=weight_TK)
