"""Norm and rotation of query and key heads in plain PyTorch: the reference of the Triton kernels.

Axes: T tokens; C columns of q, k and v side by side; H query and key heads; W columns of a head, of cos and sin only
    the rotated ones.
A pair (first, second) of a head's columns becomes ``(first * cos - second * sin, second * cos + first * sin)``. The
gradient uses the transposed map: the inverse rotation times the factor that cos and sin may carry.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from lightning_fastft.kernels.backends import one_kernel, wide_dtype


class RopeForm(NamedTuple):
    """Layout of the heads in the fused projection, their norm, and which of their columns are rotated.

    Args:
        num_heads: Query heads; their columns come first.
        num_kv_heads: Key heads, then as many value heads.
        head_width: Columns of a head.
        rotary_width: Number of leading columns of a head that are rotated, even; None for all. The others are normed
            but not rotated.
        has_norm: True if q and k pass an RMSNorm over each head before the rotation (Qwen3, Gemma 3).
        eps: Added to the mean square inside the norm.
        weight_offset: Added to the weights of the norm (Gemma: 1.0).
        is_weight_wide: False if the normed value is rounded to its dtype before the product with the weight (Llama,
            Qwen3), True if it is not (Gemma).
        is_interleaved: True if columns 2 i and 2 i + 1 are a pair (GLM-4, ERNIE 4.5), False if i and i +
            rotary_width / 2 are (Llama).
        has_gate: The columns of each query head are followed by the same number of gate columns (Qwen3-Next, Qwen3.5),
            which are not read here. The backward writes into a gradient whose gate columns are already written.

    Source:
        RoFormer, arXiv 2104.09864; RMSNorm, arXiv 1910.07467; orders of columns as in transformers,
        ``apply_rotary_pos_emb``.

    Example:
        >>> RopeForm(num_heads=32, num_kv_heads=8, head_width=128).num_columns
        6144
    """

    num_heads: int
    num_kv_heads: int
    head_width: int
    rotary_width: int | None = None
    has_norm: bool = False
    eps: float = 1e-6
    weight_offset: float = 0.0
    is_weight_wide: bool = False
    is_interleaved: bool = False
    has_gate: bool = False

    @property
    def num_rotated(self) -> int:
        """Return the number of rotated columns of a head."""
        return self.head_width if self.rotary_width is None else self.rotary_width

    @property
    def num_qk_columns(self) -> int:
        """Return the number of columns of all query and key heads."""
        return (self.num_heads + self.num_kv_heads) * self.head_width

    @property
    def query_step(self) -> int:
        """Return the number of columns from one query head to the next."""
        return (2 if self.has_gate else 1) * self.head_width

    @property
    def num_columns(self) -> int:
        """Return the number of columns of the projection."""
        return self.num_heads * self.query_step + 2 * self.num_kv_heads * self.head_width

    @property
    def head_counts(self) -> tuple[int, int, int]:
        """Return the number of query, key and value heads."""
        return self.num_heads, self.num_kv_heads, self.num_kv_heads


class Rope(NamedTuple):
    """The step from raw projections to queries and keys.

    Args:
        cos_TW: Output of the model's rotary embedding, without the batch axis. Shape (T, rotary_width); dtype of the
            projection or fp32; last axis contiguous. Interleaved forms read the first half only, one value per pair, as
            GLM-4 and ERNIE 4.5 do. A model that repeats each value (Cohere) passes ``torch.cat([cos[:, ::2]] * 2,
            dim=1)``.
        sin_TW: As cos_TW.
        q_weight_W: Weight of the query heads' norm. Shape (head_width,), contiguous; bf16, fp16, fp32 or the dtype of
            the projection; only with form.has_norm.
        k_weight_W: As q_weight_W, for the key heads.
        form: Positions of the heads, whether they are normed, and how columns are paired.
    """

    cos_TW: torch.Tensor
    sin_TW: torch.Tensor
    q_weight_W: torch.Tensor | None
    k_weight_W: torch.Tensor | None
    form: RopeForm


class Heads(NamedTuple):
    """Queries, keys and values of all tokens, or their gradients, each token's heads contiguous.

    The gradient of a key and value head is the sum over the query heads that share it. An attention backward may return
    one share per query head instead: keys and values then have num_heads gradients, adjacent ones belong to one head,
    and the kernel sums them.

    Args:
        q_THW: Shape (T, num_heads, head_width).
        k_TGW: Shape (T, num_kv_heads, head_width).
        v_TGW: As k_TGW.
    """

    q_THW: torch.Tensor
    k_TGW: torch.Tensor
    v_TGW: torch.Tensor


@one_kernel
def qk_rope_heads(qkv_TC: torch.Tensor, rope: Rope) -> Heads:
    """Return normed and rotated q and k, and v.

    Each value is rounded once from fp32 (float64 for float64), and once more before the weight if the form says so.
    """
    form, dtype, wide = rope.form, qkv_TC.dtype, wide_dtype(qkv_TC.dtype)
    rows_TC = _drop_gates(qkv_TC, form) if form.has_gate else qkv_TC
    x_THW = _split_heads(rows_TC, form).to(wide)
    if form.has_norm:
        x_THW = x_THW * _reciprocal_rms(x_THW, form)
        if not form.is_weight_wide:
            x_THW = x_THW.to(dtype).to(wide)
        x_THW = x_THW * _head_weights(rope, wide)
    cos_first, cos_second, sin_first, sin_second = _split_angles(rope, wide)
    x_THW = _mix_pairs(x_THW, cos_first, cos_second, -sin_first, sin_second, form).to(dtype)
    v_TGW = rows_TC[:, form.num_qk_columns :].unflatten(1, (form.num_kv_heads, form.head_width))
    heads = (*x_THW.split(form.head_counts[:2], dim=1), v_TGW)
    return Heads(*(head.clone(memory_format=torch.contiguous_format) for head in heads))


@one_kernel
def qk_rope_backward(
    d_heads: Heads,
    qkv_TC: torch.Tensor | None,
    rope: Rope,
    *,
    needs_weight: bool,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return the gradients of the raw projection and of the weights of the norms.

    The normed heads are recomputed from the raw rows.
    """
    form, dtype = rope.form, d_heads.q_THW.dtype
    wide = wide_dtype(dtype)
    d_k_TGW, d_v_TGW = (
        d.to(wide).unflatten(1, (form.num_kv_heads, -1)).sum(dim=2) for d in (d_heads.k_TGW, d_heads.v_TGW)
    )
    cos_first, cos_second, sin_first, sin_second = _split_angles(rope, wide)
    d_THW = torch.cat([d_heads.q_THW.to(wide), d_k_TGW], dim=1)
    d_THW = _mix_pairs(d_THW, cos_first, cos_second, sin_second, -sin_first, form)
    d_q_weight_W = d_k_weight_W = None
    if form.has_norm:
        assert qkv_TC is not None
        x_THW = _split_heads(_drop_gates(qkv_TC, form) if form.has_gate else qkv_TC, form).to(wide)
        scale_T = _reciprocal_rms(x_THW, form)
        x_THW = x_THW * scale_T
        if needs_weight:
            d_weight_HW = (d_THW * x_THW).sum(dim=0)
            d_q_weight_W, d_k_weight_W = (
                d_weight_HW[: form.num_heads].sum(dim=0),
                d_weight_HW[form.num_heads :].sum(dim=0),
            )
        d_THW = d_THW * _head_weights(rope, wide)
        d_THW = scale_T * (d_THW - x_THW * (d_THW * x_THW).mean(dim=2, keepdim=True))
    if out is None:
        out = torch.empty(len(d_THW), form.num_columns, dtype=dtype, device=d_THW.device)
    queries_THW, others_TC = _split_gated(out, form)
    queries_THW.copy_(d_THW[:, : form.num_heads])
    others_TC.copy_(torch.cat([d_THW[:, form.num_heads :], d_v_TGW], dim=1).flatten(1))
    return out, d_q_weight_W, d_k_weight_W


def _split_gated(rows_TC: torch.Tensor, form: RopeForm) -> tuple[torch.Tensor, torch.Tensor]:
    """Return views of the query heads without gates, and of the columns of keys and values."""
    num_query_columns = form.num_heads * form.query_step
    queries = rows_TC[:, :num_query_columns].unflatten(1, (form.num_heads, form.query_step))
    return queries[..., : form.head_width], rows_TC[:, num_query_columns:]


def _drop_gates(rows_TC: torch.Tensor, form: RopeForm) -> torch.Tensor:
    """Return the projection without the columns of gates."""
    queries_THW, others = _split_gated(rows_TC, form)
    return torch.cat([queries_THW.flatten(1), others], dim=1)


def _split_heads(qkv_TC: torch.Tensor, form: RopeForm) -> torch.Tensor:
    """Return a view of the query and key heads."""
    return qkv_TC[:, : form.num_qk_columns].unflatten(1, (form.num_heads + form.num_kv_heads, form.head_width))


def _split_pairs(x_THW: torch.Tensor, form: RopeForm) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return views of the first and the second column of each pair, and of the columns that are not rotated."""
    width = form.num_rotated
    if form.is_interleaved:
        return x_THW[..., 0:width:2], x_THW[..., 1:width:2], x_THW[..., width:]
    return x_THW[..., : width // 2], x_THW[..., width // 2 : width], x_THW[..., width:]


def _split_angles(rope: Rope, wide: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return cos of each pair's first and second column, then sin, with an axis for heads.

    Interleaved pairs share one angle, which is in the first half.
    """
    num_pairs = rope.form.num_rotated // 2
    second = slice(num_pairs) if rope.form.is_interleaved else slice(num_pairs, None)
    cos_THW, sin_THW = rope.cos_TW[:, None].to(wide), rope.sin_TW[:, None].to(wide)
    return cos_THW[..., :num_pairs], cos_THW[..., second], sin_THW[..., :num_pairs], sin_THW[..., second]


def _mix_pairs(
    x_THW: torch.Tensor,
    keep_first: torch.Tensor,
    keep_second: torch.Tensor,
    into_first: torch.Tensor,
    into_second: torch.Tensor,
    form: RopeForm,
) -> torch.Tensor:
    """Return the heads after a linear map of each pair: ``own * x + other * partner`` for each column."""
    mixed_THW = torch.empty_like(x_THW)
    first, second, rest = _split_pairs(x_THW, form)
    mixed_first, mixed_second, mixed_rest = _split_pairs(mixed_THW, form)
    mixed_first.copy_(first * keep_first + second * into_first)
    mixed_second.copy_(second * keep_second + first * into_second)
    mixed_rest.copy_(rest)
    return mixed_THW


def _reciprocal_rms(x_THW: torch.Tensor, form: RopeForm) -> torch.Tensor:
    """Return the factor that gives a head a mean square of 1."""
    return torch.rsqrt(x_THW.square().mean(dim=2, keepdim=True) + form.eps)


def _head_weights(rope: Rope, wide: torch.dtype) -> torch.Tensor:
    """Return the weights of every query and key head, one row each."""
    form, q_weight_W, k_weight_W = rope.form, rope.q_weight_W, rope.k_weight_W
    assert q_weight_W is not None
    assert k_weight_W is not None
    q_HW, k_HW = q_weight_W.to(wide).expand(form.num_heads, -1), k_weight_W.to(wide).expand(form.num_kv_heads, -1)
    return torch.cat([q_HW, k_HW]) + form.weight_offset
