"""Cross-entropy of labelled rows in plain PyTorch: the formula, and the reference of the Triton kernel.

Axes: T tokens of the pack, D model width, V vocabulary, R rows that have a label.
The logits of a row are ``softcap * tanh(scale * (W h + b) / softcap)``, or ``scale * (W h + b)`` without a soft cap.
"""

from __future__ import annotations

import torch

from lightning_fastft.kernels.backends import one_kernel, wide_dtype

IGNORED_TARGET = -100


def scale_and_cap(logits: torch.Tensor, *, scale: float, softcap: float | None) -> torch.Tensor:
    """Return the logits after a model's scale and soft cap."""
    scaled = logits * scale
    return scaled if softcap is None else softcap * torch.tanh(scaled / softcap)


@one_kernel
def row_losses(
    logits_RV: torch.Tensor,
    target_R: torch.Tensor,
    *,
    scale: float,
    softcap: float | None,
    gradient_factor: float | None,
    count_correct: bool,
    with_entropy: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return each row's loss; if asked, overwrite the raw logits with their gradient of the summed loss times a factor.

    A target of -100 gives a loss, an entropy and a gradient of 0. Arithmetic is fp32 (float64 for float64 logits).
    """
    value_RV = logits_RV.to(wide_dtype(logits_RV.dtype)) * scale
    slope_RV = None
    if softcap is not None:
        tanh_RV = torch.tanh(value_RV / softcap)
        value_RV, slope_RV = softcap * tanh_RV, 1 - tanh_RV * tanh_RV
    is_trained_R = target_R != IGNORED_TARGET
    column_R1 = target_R.clamp(min=0)[:, None]
    log_share_RV = torch.log_softmax(value_RV, dim=1)
    nll_R = torch.where(is_trained_R, -log_share_RV.gather(1, column_R1)[:, 0], 0.0)
    # argmax takes the first of equal values.
    correct_R = (value_RV.argmax(dim=1) == target_R) if count_correct else None
    entropy_R = None
    if with_entropy:
        share_RV = log_share_RV.exp()
        # 0 times the logarithm of 0 is 0.
        entropy_R = -torch.where(share_RV == 0, 0.0, share_RV * log_share_RV).sum(dim=1)
        entropy_R = torch.where(is_trained_R, entropy_R, 0.0)
    if gradient_factor is not None:
        gradient_RV = log_share_RV.exp_()
        gradient_RV.scatter_add_(1, column_R1, gradient_RV.new_full((1, 1), -1.0).expand(column_R1.shape))
        gradient_RV.mul_(torch.where(is_trained_R, scale * gradient_factor, 0.0).to(gradient_RV.dtype)[:, None])
        if slope_RV is not None:
            gradient_RV.mul_(slope_RV)
        logits_RV.copy_(gradient_RV)
    return nll_R, correct_R, entropy_R
