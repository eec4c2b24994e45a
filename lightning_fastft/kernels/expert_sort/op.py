"""Sort routed slots by expert: one stable sort and one count give the indices that grouped products need.

Axes: T tokens of the pack, K experts per token, N routed slots (T * K), E experts.
"""

from __future__ import annotations

import torch

from lightning_fastft.core.checks import check_int, check_tensor
from lightning_fastft.core.errors import ShapeError
from lightning_fastft.kernels.backends import choose_module, must_check
from lightning_fastft.kernels.expert_sort import reference
from lightning_fastft.kernels.expert_sort.reference import ExpertOrder

__all__ = ["MAX_EXPERTS", "ExpertOrder", "sort_by_expert"]

# The kernel holds the ends of all experts in registers: 32 per thread at this limit.
MAX_EXPERTS = 4096
# Slots and places are int32, and the last block may reach 4,096 past the last slot.
_MAX_SLOTS = 2**31 - 2**12


def sort_by_expert(expert_TK: torch.Tensor, *, num_experts: int, is_checked: bool = True) -> ExpertOrder:
    """Return the routed slots in the stable order of their experts, its inverse, and where each expert ends.

    Slots of one expert keep the order of their tokens. An id below 0 or from num_experts on means no expert (expert
    parallelism marks slots of other ranks this way). Such slots come last, from ``end_E[-1]`` on, in slot order for any
    ids.

    Args:
        expert_TK: The experts of each token. Shape (T, K) with K at least 1; int64 or int32; any strides.
        num_experts: E, between 1 and 4096.
        is_checked: As in ``must_check``.

    Returns:
        An ``ExpertOrder`` of three contiguous int32 tensors on the device of expert_TK: slot_N, place_TK and end_E.

    Raises:
        ShapeError: expert_TK has another shape or dtype, or more slots than int32 counts.
        OptionError: num_experts is not allowed.

    Cost:
        Triton: three launches, N (E + 256) comparisons, and N E / 256 counts of scratch; no atomics, no host sync.

    Source:
        Counting sort: H. H. Seward, MIT report R-232 (1954), as in Knuth, The Art of Computer Programming 3, 5.2; the
        division into blocks is own.

    Example:
        >>> order = sort_by_expert(torch.tensor([[2, 0], [0, 9], [1, 0]]), num_experts=3)
        >>> order.slot_N.tolist(), order.end_E.tolist()
        ([1, 2, 5, 4, 0, 3], [3, 4, 5])
        >>> order.place_TK.tolist()
        [[4, 0], [1, 5], [3, 2]]
    """
    if must_check(is_checked):
        check_tensor("expert_TK", expert_TK, ndim=2, dtypes=(torch.int64, torch.int32))
        check_int("num_experts", num_experts, low=1, high=MAX_EXPERTS)
        if expert_TK.shape[1] < 1:
            raise ShapeError(
                f"expert_TK has shape {tuple(expert_TK.shape)}: each token needs at least one expert (K >= 1)."
            )
        if expert_TK.numel() > _MAX_SLOTS:
            raise ShapeError(
                f"expert_TK has {expert_TK.numel()} slots; int32 indices allow at most {_MAX_SLOTS}. Sort fewer "
                "tokens at a time."
            )
    return choose_module(reference, expert_TK, dtypes=None).sort_slots(expert_TK, num_experts=num_experts)
