"""Losses of labelled rows, and the low-rank part of an adapted layer, through PyTorch's own autograd: what the
operations of the package are compared with.
"""

import torch

from lightning_fastft.kernels.backends import wide_dtype
from lightning_fastft.kernels.cross_entropy.reference import IGNORED_TARGET, scale_and_cap
from lightning_fastft.kernels.divergence.reference import kl


def cross_entropy_twin(head, *, row_R, target_R, num_items):
    """The summed cross-entropy of the rows, divided by num_items; soft cap as in Gemma 2 (arXiv 2408.00118)."""
    logits_RV = _logits(head, row_R)
    loss = torch.nn.functional.cross_entropy(logits_RV, target_R, ignore_index=IGNORED_TARGET, reduction="sum")
    return loss / num_items


def log_probs_twin(head, *, row_R, target_R):
    """The log-probability of each row's target and the entropy of each row."""
    logits_RV = _logits(head, row_R)
    log_prob_R = -torch.nn.functional.cross_entropy(logits_RV, target_R, ignore_index=IGNORED_TARGET, reduction="none")
    entropy_R = torch.distributions.Categorical(logits=logits_RV, validate_args=False).entropy()
    return log_prob_R, torch.where(target_R == IGNORED_TARGET, 0.0, entropy_R)


def divergence_twin(student, teacher, *, row_R, kind, beta=0.5):
    """The divergence of each row: arXiv 2306.13649, equation 1."""
    log_q_RV, log_p_RV = (_logits(head, row_R).log_softmax(dim=1) for head in (student, teacher))
    if kind == "forward_kl":
        return kl(log_p_RV, log_q_RV)
    if kind == "reverse_kl":
        return kl(log_q_RV, log_p_RV)
    log_m_RV = (beta * log_p_RV.exp() + (1 - beta) * log_q_RV.exp()).log()
    return beta * kl(log_p_RV, log_m_RV) + (1 - beta) * kl(log_q_RV, log_m_RV)


def topk_divergence_twin(student, *, teacher_id_RK, teacher_log_prob_RK, row_R, tail="bucket"):
    """KL(teacher || student) over the stored tokens; the others are one more token, or are ignored on both sides."""
    log_share_RV = _logits(student, row_R).log_softmax(dim=1)
    log_q_RK, log_p_RK = log_share_RV.gather(1, teacher_id_RK), teacher_log_prob_RK.to(log_share_RV.dtype)
    if tail == "renormalise":
        return kl(log_p_RK.log_softmax(dim=1), log_q_RK.log_softmax(dim=1))
    log_rest_R = log_share_RV.scatter(1, teacher_id_RK, -torch.inf).logsumexp(dim=1)
    teacher_rest_R = 1 - log_p_RK.exp().sum(dim=1)
    return kl(log_p_RK, log_q_RK) + teacher_rest_R * (teacher_rest_R.log() - log_rest_R)


def lora_addmm_twin(base_TN, x_TD, a_RD, b_NR, *, scale):
    """``base + scale * (x A^T) B^T`` in the common dtype of the arguments (LoRA, arXiv 2106.09685)."""
    return base_TN + scale * ((x_TD @ a_RD.T) @ b_NR.T)


def _logits(head, row_R):
    logits_RV = torch.nn.functional.linear(head.hidden_TD[row_R], head.weight_VD, head.bias_V)
    logits_RV = scale_and_cap(logits_RV, scale=head.scale, softcap=head.softcap)
    return logits_RV.to(wide_dtype(logits_RV.dtype))
