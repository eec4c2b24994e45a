"""The low-rank part of an adapted linear layer in plain PyTorch.

Axes: T tokens of the pack, D input width, N output width, R rank of the adapter.
"""

from __future__ import annotations

import torch


def lora_addmm_reference(
    base_TN: torch.Tensor, x_TD: torch.Tensor, a_RD: torch.Tensor, b_NR: torch.Tensor, *, scale: float
) -> torch.Tensor:
    """Return ``base + scale * (x A^T) B^T`` through PyTorch's own autograd, in the common dtype of the arguments.

    Source:
        LoRA, arXiv 2106.09685.
    """
    return base_TN + scale * ((x_TD @ a_RD.T) @ b_NR.T)
