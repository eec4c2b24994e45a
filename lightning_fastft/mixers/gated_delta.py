"""The gated delta rule of packed documents, from the fused projection of a layer to the input of its output projection.

On a GPU the rule runs once on the whole pack with the kernels of fla-core (on the meta device, with their shapes); on a
CPU it runs in plain PyTorch, once per document. Our kernels around it read and write columns of the fused projection in
place.

Axes: T tokens of the pack, L tokens of a document, C columns of the fused projection, G query and key heads, H value
    heads, W columns of a head, I = H W, c tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lightning_fastft.hf.mixers import MixerFamily
from lightning_fastft.kernels.backends import wide_dtype
from lightning_fastft.kernels.delta_inputs.op import make_delta_inputs
from lightning_fastft.kernels.delta_inputs.reference import DeltaForm, DeltaInputs, DeltaParameters
from lightning_fastft.kernels.handover import Handover
from lightning_fastft.kernels.head_gate.op import gate_heads
from lightning_fastft.kernels.head_gate.reference import HeadGateForm
from lightning_fastft.mixers.install import BY_DOCUMENT, ON_KERNELS
from lightning_fastft.mixers.kernels import find_kernels
from lightning_fastft.packing.context import BatchContext

_CHUNK = 64


def gated_delta(
    rows_TC: torch.Tensor,
    parameters: DeltaParameters,
    norm_weight_W: torch.Tensor,
    *,
    form: DeltaForm,
    eps: float,
    family: MixerFamily,
    context: BatchContext,
) -> torch.Tensor:
    """Return the normed and gated output of the gated delta rule, each document from an empty state; differentiable.

    The convolution, norms and decays are computed in fp32 and rounded once; strengths stay in fp32.

    Args:
        rows_TC: Output of the fused projection for the pack.
        parameters: Weights of the convolution and of the decays.
        norm_weight_W: Weight of the output norm.
        form: Layout of the inputs among the columns.
        eps: Added to the mean square inside the norm.
        family: Description of the mixer, for error messages.
        context: The metadata of the pack, on the device of the rows.

    Returns:
        Shape (T, I), contiguous.

    Raises:
        UnsupportedModelError: The rows are on a GPU, and fla-core is not installed.

    Cost:
        On a GPU six launches, plus the launches of fla-core; no host sync and no copy of columns. Two Functions write
        the gradient of rows_TC once, into the same memory. Saves rows_TC, and inputs and output of the rule.

    Source:
        Gated delta networks, arXiv 2412.06464.
    """
    row_gradient = Handover()
    inputs = make_delta_inputs(rows_TC, parameters, context.position_T, form=form, row_gradient=row_gradient)
    if rows_TC.is_cuda or rows_TC.is_meta:
        rule = find_kernels(family, is_meta=rows_TC.is_meta)["torch_chunk_gated_delta_rule"]
        q, k, v, g, beta = (part[None] for part in inputs)
        out_THW = rule(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=False, context=context)[0][0]
        context.note_read(ON_KERNELS)
    else:
        out_THW = delta_rule_by_document(inputs, context.lengths)
        context.note_read(BY_DOCUMENT)
    gate = HeadGateForm(form.gates, "silu", has_norm=True, eps=eps)
    return gate_heads(out_THW, rows_TC, norm_weight_W, form=gate, row_gradient=row_gradient)


def delta_rule_by_document(inputs: DeltaInputs, lengths: Sequence[int]) -> torch.Tensor:
    """Return the output of the gated delta rule, computed per document, shape (T, H, W), in plain PyTorch.

    ``S[t] = exp(g) S[t - 1] + k (beta (v - k^T exp(g) S[t - 1]))^T`` and ``out = S^T q / sqrt(width)``, computed in
    fp32 (float64 for float64).

    Example:
        >>> one = torch.ones(2, 1, 1)
        >>> delta_rule_by_document(DeltaInputs(one, one, one, torch.zeros(2, 1), one[..., 0]), [1, 1]).flatten()
        tensor([1., 1.])
    """
    wide = wide_dtype(inputs.q_TGW.dtype)
    documents = zip(*(part.to(wide).split(list(lengths)) for part in inputs))
    return torch.cat([_delta_rule(DeltaInputs(*parts)) for parts in documents]).to(inputs.q_TGW.dtype)


def _delta_rule(inputs: DeltaInputs) -> torch.Tensor:
    """Return the output of one document, shape (L, H, W), chunk by chunk.

    Inside a chunk the updates ``u`` solve ``(1 + A) u = beta (v - exp(sum of g) k^T S)``, where A holds the decayed
    products of each key with the keys of earlier tokens.
    """
    num_heads = inputs.v_THW.shape[1]
    q_HLW, k_HLW = (
        part.repeat_interleave(num_heads // part.shape[1], dim=1).transpose(0, 1)
        for part in (inputs.q_TGW * inputs.q_TGW.shape[2] ** -0.5, inputs.k_TGW)
    )
    v_HLW, g_HL, beta_HL = inputs.v_THW.transpose(0, 1), inputs.g_TH.T, inputs.beta_TH.T
    state_HWW = v_HLW.new_zeros(num_heads, k_HLW.shape[2], v_HLW.shape[2])
    outputs = []
    for q, k, v, g, beta in zip(*(part.split(_CHUNK, dim=1) for part in (q_HLW, k_HLW, v_HLW, g_HL, beta_HL))):
        total_Hc = g.cumsum(dim=1)
        later = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool, device=q.device).triu(1)
        # Mask before exp, so that its gradient is 0 and not NaN.
        decay_Hcc = (total_Hc[:, :, None] - total_Hc[:, None, :]).masked_fill(later, -torch.inf).exp()
        met_Hcc = (k * beta[..., None]) @ k.mT * decay_Hcc
        from_start = total_Hc.exp()[..., None]
        wanted_HcW = beta[..., None] * (v - from_start * (k @ state_HWW))
        update_HcW = torch.linalg.solve_triangular(met_Hcc, wanted_HcW, upper=False, unitriangular=True)
        outputs.append(from_start * (q @ state_HWW) + (q @ k.mT * decay_Hcc) @ update_HcW)
        to_end = (total_Hc[:, -1:] - total_Hc).exp()[..., None]
        state_HWW = total_Hc[:, -1:, None].exp() * state_HWW + (k * to_end).mT @ update_HcW
    return torch.cat(outputs, dim=1).transpose(0, 1)
