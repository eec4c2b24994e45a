"""Losses on log-probabilities: of preferences, rewards and policies; plain functions of tensors, without a model.

Axes: R labelled rows, C completions, G examples (for pairs: a chosen and a rejected completion each).

Source:
    The formulas of the papers that each function names, in the form of TRL 1.16 where papers and practice differ.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch.nn.functional import logsigmoid

from lightning_fastft.core.errors import OptionError

PreferenceLoss = Literal[
    "sigmoid", "sigmoid_norm", "hinge", "ipo", "robust", "orpo", "simpo", "cpo", "kto", "apo_zero", "apo_down"
]
PolicyLoss = Literal["grpo", "dapo", "dr_grpo", "cispo", "sapo"]

PREFERENCE_LOSSES: tuple[PreferenceLoss, ...] = get_args(PreferenceLoss)
# A new loss: its name above, in the sets below that fit it, and its formula in preference_loss.
# Losses on the ratio to a reference model.
REFERENCE_LOSSES: frozenset[str] = frozenset(PREFERENCE_LOSSES) - {"orpo", "simpo", "cpo"}
# Losses on the mean over a completion's tokens, not on their sum.
MEAN_LOSSES: frozenset[str] = frozenset({"sigmoid_norm", "ipo", "orpo", "simpo"})
# Losses with a label_smoothing.
SMOOTHED_LOSSES: frozenset[str] = frozenset({"sigmoid", "sigmoid_norm", "robust", "simpo", "cpo"})
# Weight of the negative log-likelihood of chosen completions where none is asked for.
SFT_WEIGHTS = {"orpo": 1.0, "cpo": 1.0}
POLICY_LOSSES: tuple[PolicyLoss, ...] = get_args(PolicyLoss)
# Policy losses with the clipping of PPO.
CLIPPED_LOSSES: frozenset[str] = frozenset({"grpo", "dapo", "dr_grpo"})
# Policy losses that are a mean over all tokens; the others are one over completions.
TOKEN_LOSSES: frozenset[str] = frozenset({"dapo", "cispo"})


def preference_loss(
    chosen_G: torch.Tensor,
    rejected_G: torch.Tensor,
    *,
    loss: PreferenceLoss,
    beta: float,
    label_smoothing: float = 0.0,
    gamma: float = 0.0,
) -> torch.Tensor:
    """Return the loss of each pair, shape (G,).

    Args:
        chosen_G: Log-probability of the chosen completion, or its difference to the reference model's
            (``REFERENCE_LOSSES``); summed over tokens, or their mean (``MEAN_LOSSES``).
        rejected_G: The same of the rejected completion.
        loss: Any of ``PREFERENCE_LOSSES`` but "kto".
        beta: Sharpness of the comparison; for "ipo" the regularisation tau, for "orpo" the weight lambda.
        label_smoothing: Probability that a label is wrong (``SMOOTHED_LOSSES``).
        gamma: Margin of "simpo".

    Raises:
        OptionError: The loss has no formula here.

    Source:
        DPO arXiv:2305.18290, smoothed as in cDPO, and length-normalised arXiv:2411.15124; SLiC arXiv:2305.10425; IPO
        arXiv:2310.12036, length-normalised as its authors advise; robust DPO arXiv:2403.00409; ORPO arXiv:2403.07691;
        SimPO arXiv:2405.14734; CPO arXiv:2401.08417; APO-zero and APO-down arXiv:2408.06266.

    Example:
        >>> preference_loss(torch.tensor([1.0]), torch.tensor([1.0]), loss="hinge", beta=0.1).tolist()
        [1.0]
    """
    margin_G = chosen_G - rejected_G
    if loss == "hinge":
        return torch.relu(1 - beta * margin_G)
    if loss == "ipo":
        return (margin_G - 1 / (2 * beta)).square()
    if loss == "apo_zero":
        return 1 - torch.sigmoid(beta * chosen_G) + torch.sigmoid(beta * rejected_G)
    if loss == "apo_down":
        return 1 - torch.sigmoid(beta * margin_G) + torch.sigmoid(beta * chosen_G)
    if loss == "orpo":
        log_odds_G = margin_G - (_log1m_exp(chosen_G) - _log1m_exp(rejected_G))
        return -beta * logsigmoid(log_odds_G)
    if loss not in SMOOTHED_LOSSES:
        raise OptionError(f"loss={loss!r} has no formula for pairs.")
    scaled_G = beta * margin_G - (gamma if loss == "simpo" else 0.0)
    kept_G, flipped_G = -logsigmoid(scaled_G), -logsigmoid(-scaled_G)
    if loss == "robust":
        return ((1 - label_smoothing) * kept_G - label_smoothing * flipped_G) / (1 - 2 * label_smoothing)
    return (1 - label_smoothing) * kept_G + label_smoothing * flipped_G


def kto_loss(
    ratio_C: torch.Tensor,
    is_desirable_C: torch.Tensor,
    *,
    baseline: torch.Tensor,
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> torch.Tensor:
    """Return the loss of each completion, shape (C,).

    Args:
        ratio_C: Log-probability of the completion minus the reference model's.
        is_desirable_C: 1 for a desirable completion, 0 for an undesirable one; floating.
        baseline: Estimated divergence from the reference model, 0-dim, at least 0, without gradient.
        beta: Sharpness.
        desirable_weight: Weight of desirable completions.
        undesirable_weight: Weight of undesirable completions.

    Source:
        arXiv:2402.01306.
    """
    desirable_C = 1 - torch.sigmoid(beta * (ratio_C - baseline))
    undesirable_C = 1 - torch.sigmoid(beta * (baseline - ratio_C))
    return desirable_weight * is_desirable_C * desirable_C + undesirable_weight * (1 - is_desirable_C) * undesirable_C


def reward_pair_loss(chosen_G: torch.Tensor, rejected_G: torch.Tensor, *, margin_G: torch.Tensor) -> torch.Tensor:
    """Return the negative log-likelihood that each chosen completion beats its rejected one by a margin, shape (G,).

    Source:
        Bradley and Terry (1952); the margin is Llama 2's, arXiv:2307.09288.
    """
    return -logsigmoid(chosen_G - rejected_G - margin_G)


def policy_loss(
    log_prob_R: torch.Tensor,
    *,
    ratio_R: torch.Tensor,
    advantage_R: torch.Tensor,
    loss: PolicyLoss = "grpo",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    sapo_temperature_pos: float = 1.0,
    sapo_temperature_neg: float = 1.05,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss of each labelled row before averaging, and whether its ratio is clipped; both shape (R,).

    Args:
        log_prob_R: Log-probability of each token under the trained model; "cispo" weighs its gradient.
        ratio_R: Importance ratio to the model before the update, of the token or of its completion.
        advantage_R: Advantage of the completion that a row belongs to.
        loss: Any of ``POLICY_LOSSES``. Those of ``CLIPPED_LOSSES`` have one formula.
        clip_low: The ratio counts down to 1 - clip_low (``CLIPPED_LOSSES``).
        clip_high: The ratio counts up to 1 + clip_high (``CLIPPED_LOSSES`` and "cispo").
        dual_clip: Largest ratio for negative advantages, above 1 + clip_high (``CLIPPED_LOSSES``); None for none.
        sapo_temperature_pos: Sharpness of the gate of "sapo" for positive advantages.
        sapo_temperature_neg: The same for the other advantages.

    Source:
        PPO's clipping in GRPO's form, arXiv:2402.03300; separate bounds arXiv:2503.14476 (DAPO); dual_clip
        arXiv:1912.09729 and arXiv:2505.07291 (INTELLECT-2); CISPO arXiv:2506.13585; SAPO arXiv:2511.20347.

    Example:
        >>> rows = {"ratio_R": torch.tensor([0.5, 2.0]), "advantage_R": torch.ones(2)}
        >>> loss_R, is_clipped_R = policy_loss(torch.zeros(2), clip_high=0.5, **rows)
        >>> loss_R.tolist(), is_clipped_R.tolist()
        ([-0.5, -1.5], [False, True])
    """
    if loss == "sapo":
        sharpness_R = torch.where(advantage_R > 0, sapo_temperature_pos, sapo_temperature_neg)
        gate_R = torch.sigmoid(sharpness_R * (ratio_R - 1)) * 4 / sharpness_R
        return -gate_R * advantage_R, torch.zeros_like(ratio_R, dtype=torch.bool)
    is_high_R = ratio_R > 1 + clip_high
    if loss == "cispo":
        weight_R = ratio_R.detach().clamp(max=1 + clip_high)
        return -weight_R * advantage_R * log_prob_R, is_high_R
    clipped_R = ratio_R.clamp(1 - clip_low, 1 + clip_high)
    is_clipped_R = ((ratio_R < 1 - clip_low) & (advantage_R < 0)) | (is_high_R & (advantage_R > 0))
    if dual_clip is not None:
        is_clipped_R = is_clipped_R | ((ratio_R > dual_clip) & (advantage_R < 0))
        ratio_R = ratio_R.clamp(max=dual_clip)
    return -torch.minimum(ratio_R * advantage_R, clipped_R * advantage_R), is_clipped_R


def sampler_weight(old_log_prob_R: torch.Tensor, sampler_log_prob_R: torch.Tensor, *, clip: float) -> torch.Tensor:
    """Return the weight of each row that corrects for the model that sampled, shape (R,); 1 where it is not known.

    Args:
        old_log_prob_R: Log-probability of each token under the model before the update, without gradient.
        sampler_log_prob_R: The same under the model that sampled, which computes in another precision; NaN where it is
            not known.
        clip: Largest weight (truncated importance sampling).

    Source:
        arXiv:2405.03206 and Yao et al., 2025.
    """
    return (old_log_prob_R - sampler_log_prob_R).exp().clamp(max=clip).nan_to_num(nan=1.0)


def reference_divergence(
    log_prob_R: torch.Tensor, reference_log_prob_R: torch.Tensor, *, ratio_R: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the divergence of the trained model from the reference model in each row, shape (R,).

    Args:
        log_prob_R: Log-probability of each token under the trained model.
        reference_log_prob_R: The same under the reference model.
        ratio_R: Importance ratio that the divergence is multiplied by, with its gradient. With the ratio of each token,
            the expected gradient over samples of the model before the update is that of the reverse KL divergence.
            None for the plain estimator, whose expected gradient is that of the forward KL divergence at the policy
            that sampled.

    Source:
        Schulman's k3 estimator; the ratio: DeepSeek-V3.2, arXiv:2512.02556.
    """
    distance_R = reference_log_prob_R - log_prob_R
    divergence_R = distance_R.exp() - distance_R - 1
    return divergence_R if ratio_R is None else ratio_R * divergence_R


def _log1m_exp(value: torch.Tensor) -> torch.Tensor:
    """Return log(1 - exp(value)) for values below 0, exact near 0 and far below."""
    # The unused branch must not give NaN gradients.
    near = torch.where(value > -0.6931, value, -0.6931)
    far = torch.where(value > -0.6931, -0.6931, value)
    return torch.where(value > -0.6931, torch.log(-torch.expm1(near)), torch.log1p(-torch.exp(far)))
