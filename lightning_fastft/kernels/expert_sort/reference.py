"""Routed slots in the order of their experts, in plain PyTorch.

Axes: T tokens of the pack, K experts per token, N routed slots (T * K), E experts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from lightning_fastft.kernels.backends import one_kernel


class ExpertOrder(NamedTuple):
    """Routed slots sorted by expert, and by token within an expert; all three tensors are int32.

    A slot is ``token * K + choice``. Slots without an expert (sentinels) come after the last expert, from ``end_E[-1]``
    on.

    Args:
        slot_N: The slot at each place of the sorted order.
        place_TK: The inverse: the place of each slot in the sorted order.
        end_E: One past the last place of each expert: cumulative counts, the offsets of a grouped GEMM.
    """

    slot_N: torch.Tensor
    place_TK: torch.Tensor
    end_E: torch.Tensor


@one_kernel
def sort_slots(expert_TK: torch.Tensor, *, num_experts: int) -> ExpertOrder:
    """Return the slots in the stable order of their experts; ids outside [0, num_experts) come last, in the order
    of their slots.
    """
    expert_N = expert_TK.reshape(-1)
    is_known_N = (expert_N >= 0) & (expert_N < num_experts)
    key_N = torch.where(is_known_N, expert_N, num_experts).to(torch.int32)
    slot_N = torch.argsort(key_N, stable=True)
    expert_E = torch.arange(num_experts, dtype=torch.int32, device=key_N.device)
    # searchsorted counts without the host sync of bincount and the atomics of histc.
    end_E = torch.searchsorted(key_N[slot_N], expert_E, right=True, out_int32=True)
    place_N = torch.empty(slot_N.shape, dtype=torch.int32, device=slot_N.device)
    place_N[slot_N] = torch.arange(slot_N.shape[0], dtype=torch.int32, device=slot_N.device)
    return ExpertOrder(slot_N.to(torch.int32), place_N.view(expert_TK.shape), end_E)
