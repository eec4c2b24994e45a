"""Inputs of the gated delta rule in plain PyTorch: the reference of the Triton kernels.

Axes: T tokens, C columns of the fused projection, G query and key heads, H value heads, W columns of a head, N channels
    of the convolution (queries, keys, values), K taps of the convolution.
``y[t] = silu(sum_k weight[K - 1 - k] * x[t - k])`` over taps inside the document of t; queries and keys are
``y / sqrt(sum(y^2) + eps)`` for each head. ``beta = sigmoid(b)``, ``g = -exp(A_log) * softplus(a + dt_bias)``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from lightning_fastft.kernels.backends import one_kernel, wide_dtype
from lightning_fastft.kernels.head_columns import HeadColumns

# Epsilon of the l2 norm in transformers and fla-core.
NORM_EPS = 1e-6


class DeltaForm(NamedTuple):
    """Layout of the inputs among the columns of the fused projection.

    Args:
        num_key_heads: Number of query and key heads, G.
        num_heads: Number of value heads, H, a multiple of G; adjacent value heads share a query and key head.
        key_width: Columns of a query or key head.
        value_width: Columns of a value head.
        is_grouped: True if columns are grouped by key head: (query, key, values, gates) of each, then (b, a) of each
            (Qwen3-Next). False if they are grouped by kind: queries, keys, values, gates, b, a (Qwen3.5).

    Example:
        >>> form = DeltaForm(num_key_heads=16, num_heads=32, key_width=128, value_width=128)
        >>> form.num_columns, form.gates.begin
        (12352, 8192)
    """

    num_key_heads: int
    num_heads: int
    key_width: int
    value_width: int
    is_grouped: bool = False

    @property
    def group_size(self) -> int:
        """Return the number of value heads per key head."""
        return self.num_heads // self.num_key_heads

    @property
    def num_channels(self) -> int:
        """Return the number of channels, N."""
        return 2 * self.num_key_heads * self.key_width + self.num_heads * self.value_width

    @property
    def num_columns(self) -> int:
        """Return the number of columns, C."""
        return self.num_channels + self.num_heads * (self.value_width + 2)

    @property
    def queries(self) -> HeadColumns:
        """Return the columns of the queries."""
        return HeadColumns(0, self.key_width, self.num_key_heads, 1, self._step(self.key_width))

    @property
    def keys(self) -> HeadColumns:
        """Return the columns of the keys."""
        begin = self.key_width if self.is_grouped else self.num_key_heads * self.key_width
        return self.queries._replace(begin=begin)

    @property
    def values(self) -> HeadColumns:
        """Return the columns of the values."""
        begin = 2 * self.key_width if self.is_grouped else 2 * self.num_key_heads * self.key_width
        width = self.group_size * self.value_width
        return HeadColumns(begin, self.value_width, self.num_heads, self.group_size, self._step(width))

    @property
    def gates(self) -> HeadColumns:
        """Return the columns of the output gates."""
        num_values = (self.group_size if self.is_grouped else self.num_heads) * self.value_width
        return self.values._replace(begin=self.values.begin + num_values)

    @property
    def strengths(self) -> HeadColumns:
        """Return the columns of b."""
        begin, step = self.num_columns - 2 * self.num_heads, (2 if self.is_grouped else 1) * self.group_size
        return HeadColumns(begin, 1, self.num_heads, self.group_size, step)

    @property
    def decays(self) -> HeadColumns:
        """Return the columns of a."""
        return self.strengths._replace(
            begin=self.strengths.begin + (self.group_size if self.is_grouped else self.num_heads)
        )

    def _step(self, width: int) -> int:
        """Return the step from one group of heads to the next, given the columns of a group."""
        return 2 * (self.key_width + self.group_size * self.value_width) if self.is_grouped else width


class DeltaParameters(NamedTuple):
    """Weights of the layer that compute the inputs.

    Args:
        conv_weight_NK: Weights of the convolution, one row per channel; the last tap is the token itself.
        a_log_H: Logarithm of the decay rates.
        dt_bias_H: Added to a.
    """

    conv_weight_NK: torch.Tensor
    a_log_H: torch.Tensor
    dt_bias_H: torch.Tensor


class DeltaInputs(NamedTuple):
    """Inputs of the gated delta rule, each contiguous; or their gradients.

    Args:
        q_TGW: Normed queries.
        k_TGW: Normed keys.
        v_THW: Values.
        g_TH: Logarithm of the decay, fp32 (float64 for float64).
        beta_TH: Strength of the update, as g_TH.
    """

    q_TGW: torch.Tensor
    k_TGW: torch.Tensor
    v_THW: torch.Tensor
    g_TH: torch.Tensor
    beta_TH: torch.Tensor


@one_kernel
def delta_inputs_forward(
    rows_TC: torch.Tensor, parameters: DeltaParameters, position_T: torch.Tensor, *, form: DeltaForm
) -> DeltaInputs:
    """Return the inputs of the delta rule, each value rounded once."""
    wide, dtype = wide_dtype(rows_TC.dtype), rows_TC.dtype
    heads = [columns.read(rows_TC).flatten(1) for columns in (form.queries, form.keys, form.values)]
    x_TN, weight_NK = torch.cat(heads, dim=1).to(wide), parameters.conv_weight_NK.to(wide)
    num_taps = weight_NK.shape[1]
    pre_TN = x_TN * weight_NK[:, -1]
    for shift in range(1, min(num_taps, len(x_TN))):
        before_TN = torch.nn.functional.pad(x_TN[:-shift], (0, 0, shift, 0))
        before_TN = before_TN.masked_fill((position_T < shift)[:, None], 0)
        pre_TN = pre_TN + before_TN * weight_NK[:, num_taps - 1 - shift]
    y_TN = torch.nn.functional.silu(pre_TN)
    q_TGW, k_TGW, v_THW = (
        part.unflatten(1, (columns.num_heads, columns.width))
        for part, columns in zip(
            y_TN.split([head.shape[1] for head in heads], dim=1), (form.queries, form.keys, form.values)
        )
    )
    q_TGW, k_TGW = (part * torch.rsqrt(part.square().sum(2, keepdim=True) + NORM_EPS) for part in (q_TGW, k_TGW))
    a_TH, b_TH = (columns.read(rows_TC).flatten(1).to(wide) for columns in (form.decays, form.strengths))
    rate_TH = torch.nn.functional.softplus(a_TH + parameters.dt_bias_H.to(wide))
    g_TH = -parameters.a_log_H.to(wide).exp() * rate_TH
    q_TGW, k_TGW, v_THW = (part.to(dtype).contiguous() for part in (q_TGW, k_TGW, v_THW))
    return DeltaInputs(q_TGW, k_TGW, v_THW, g_TH, torch.sigmoid(b_TH))


@one_kernel
def delta_inputs_backward(
    gradients: DeltaInputs,
    rows_TC: torch.Tensor,
    parameters: DeltaParameters,
    position_T: torch.Tensor,
    *,
    form: DeltaForm,
    needs_weights: bool,
    out: torch.Tensor,
) -> DeltaParameters | None:
    """Write the gradient of the projection into the columns of ``out`` that the forward reads, and return the gradients
    of the weights. Autograd differentiates the forward without roundings.
    """
    wide = wide_dtype(rows_TC.dtype)
    leaves = [tensor.detach().to(wide).requires_grad_() for tensor in (rows_TC, *parameters)]
    with torch.enable_grad():
        outputs = delta_inputs_forward(leaves[0], DeltaParameters(*leaves[1:]), position_T, form=form)
        d_rows_TC, *d_weights = torch.autograd.grad(outputs, leaves, [d.to(wide) for d in gradients])
    for columns in (form.queries, form.keys, form.values, form.decays, form.strengths):
        columns.write(out, columns.read(d_rows_TC))
    return DeltaParameters(*d_weights) if needs_weights else None
