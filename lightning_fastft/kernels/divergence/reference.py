"""Divergences of rows of logits in plain PyTorch: the reference of the Triton kernels.

Axes: T tokens of the pack, D model width, V vocabulary, R labelled rows, K tokens that a teacher stored.
With q the student's distribution and p the teacher's:

    forward_kl   KL(p || q) = sum p (log p - log q)           gradient to the student's logits: q - p
    reverse_kl   KL(q || p) = sum q (log q - log p)           q (log q - log p - KL(q || p))
    jsd          beta KL(p || m) + (1 - beta) KL(q || m)      (1 - beta) q (log q - log m - KL(q || m))
                 with m = beta p + (1 - beta) q
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import torch

from lightning_fastft.kernels.backends import one_kernel, wide_dtype
from lightning_fastft.kernels.cross_entropy.reference import scale_and_cap

Kind = Literal["forward_kl", "reverse_kl", "jsd"]
KINDS: tuple[Kind, ...] = get_args(Kind)


class DivergenceForm(NamedTuple):
    """Kind of divergence, and scale and soft cap of the logits of student and teacher."""

    kind: Kind
    beta: float
    scale: float
    softcap: float | None
    teacher_scale: float
    teacher_softcap: float | None


@one_kernel
def row_divergences(
    logits_RV: torch.Tensor, teacher_RV: torch.Tensor, *, form: DivergenceForm, writes_gradient: bool
) -> torch.Tensor:
    """Return each row's divergence and, if asked, overwrite the student's raw logits with its gradient.

    Arithmetic is fp32 (float64 for float64 logits of the student).
    """
    wide = wide_dtype(logits_RV.dtype)
    value_RV, slope_RV = value_and_slope(logits_RV.to(wide), scale=form.scale, softcap=form.softcap)
    teacher_RV = scale_and_cap(teacher_RV.to(wide), scale=form.teacher_scale, softcap=form.teacher_softcap)
    log_q_RV, log_p_RV = value_RV.log_softmax(dim=1), teacher_RV.log_softmax(dim=1)
    if form.kind == "forward_kl":
        divergence_R = kl(log_p_RV, log_q_RV)
        gradient_RV = log_q_RV.exp() - log_p_RV.exp()
    else:
        to_RV, factor = log_p_RV, 1.0
        if form.kind == "jsd":
            to_RV = (form.beta * log_p_RV.exp() + (1 - form.beta) * log_q_RV.exp()).log()
            factor = 1 - form.beta
        own_R = kl(log_q_RV, to_RV)
        gradient_RV = _share_times(log_q_RV, factor * (log_q_RV - to_RV - own_R[:, None]))
        divergence_R = own_R if form.kind == "reverse_kl" else form.beta * kl(log_p_RV, to_RV) + factor * own_R
    if writes_gradient:
        logits_RV.copy_(gradient_RV * slope_RV)
    return divergence_R


@one_kernel
def rest_rows(
    logits_RV: torch.Tensor,
    highest_R: torch.Tensor,
    known_R: torch.Tensor,
    teacher_rest_R: torch.Tensor,
    *,
    scale: float,
    softcap: float | None,
    writes_gradient: bool,
) -> torch.Tensor:
    """Return the logarithm of the sum of exp(logit - highest) over the tokens that the teacher did not store.

    If asked, overwrite the raw logits with the gradient of KL(teacher || student), in which those tokens count as one:
    ``share of the rest x (student's mass of the rest - teacher's)``.

    Args:
        logits_RV: Raw logits, -inf at known tokens.
        highest_R: Highest logit of the known tokens.
        known_R: The same logarithm over the known tokens.
        teacher_rest_R: The teacher's mass of the rest.
        scale: Factor on the raw logits.
        softcap: Soft cap of the scaled logits.
        writes_gradient: Overwrite the logits.
    """
    wide_RV = logits_RV.to(wide_dtype(logits_RV.dtype))
    value_RV, slope_RV = value_and_slope(wide_RV, scale=scale, softcap=softcap)
    # A soft cap would make the -inf of known tokens finite.
    value_RV = torch.where(wide_RV == -torch.inf, -torch.inf, value_RV)
    # Shares of the rest are relative to its own highest logit: far above the known ones, differences to theirs round.
    top_R = value_RV.amax(dim=1)
    value_RV = value_RV - top_R[:, None]
    own_R = value_RV.logsumexp(dim=1)
    rest_R = own_R + (top_R - highest_R)
    if writes_gradient:
        difference_R = torch.sigmoid(rest_R - known_R) - teacher_rest_R
        logits_RV.copy_((value_RV - own_R[:, None]).exp() * difference_R[:, None] * slope_RV)
    return rest_R


def value_and_slope(
    raw: torch.Tensor, *, scale: float, softcap: float | None
) -> tuple[torch.Tensor, torch.Tensor | float]:
    """Return logits after scale and soft cap, and their derivative with respect to the raw logits."""
    value = scale_and_cap(raw, scale=scale, softcap=softcap)
    return value, scale if softcap is None else scale * (1 - (value / softcap) ** 2)


def kl(log_share: torch.Tensor, log_other: torch.Tensor) -> torch.Tensor:
    """Return the sum of share x (log share - log other) over the last axis."""
    return _share_times(log_share, log_share - log_other).sum(dim=-1)


def _share_times(log_share: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Return share x factor; 0 where the share is 0, even if the factor is infinite or NaN."""
    share = log_share.exp()
    return torch.where(share == 0, 0.0, share * factor)
