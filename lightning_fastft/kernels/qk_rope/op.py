"""Norm and rotary embedding of query and key heads, and the gradient, each in one pass over a fused q, k, v projection.

Axes: T tokens; C columns of q, k and v side by side; W columns of a head, of cos and sin only the rotated ones.
Neither function is differentiable; the autograd Functions of layers call them.
"""

from __future__ import annotations

import torch

from lightning_fastft.core.checks import check_choice, check_float, check_int, check_layout, check_out
from lightning_fastft.core.errors import OptionError, ShapeError
from lightning_fastft.kernels.backends import FLOATING, TRITON_DTYPES, choose_module, must_check, no_graph
from lightning_fastft.kernels.qk_rope import reference
from lightning_fastft.kernels.qk_rope.reference import Heads, Rope, RopeForm

MAX_HEAD_WIDTH = 1024


def qk_rope_heads(qkv_TC: torch.Tensor, rope: Rope, *, is_checked: bool = True) -> Heads:
    """Return normed and rotated queries and keys, and unchanged values, in three contiguous tensors for attention.

    The arithmetic is fp32 (float64 for float64). Each value is rounded once, and once more if the form rounds before
    the norm's weight. Tokens are independent, so NaN stays in its row.

    Args:
        qkv_TC: Output of the fused projection. Shape (T, (num_heads + 2 num_kv_heads) head_width), and the gates if the
            form has them: query, key, value heads; bf16, fp16, fp32 or float64; last axis contiguous, any row stride.
        rope: Angles, weights and form.
        is_checked: As in ``must_check``.

    Returns:
        q_THW: Shape (T, num_heads, head_width), dtype and device of qkv_TC; contiguous; no graph.
        k_TGW: Shape (T, num_kv_heads, head_width).
        v_TGW: As k_TGW.

    Raises:
        OptionError: The form is unknown, or weights and form do not match.

    Cost:
        Reads and writes qkv_TC once; no host sync. The reference makes fp32 copies.

    Source:
        RoFormer, arXiv 2104.09864; RMSNorm, arXiv 1910.07467; ``apply_rotary_pos_emb`` of transformers.

    Example:
        >>> form = RopeForm(num_heads=1, num_kv_heads=1, head_width=2)
        >>> rope = Rope(torch.tensor([[0.0, 0.0]]), torch.tensor([[1.0, 1.0]]), None, None, form)
        >>> qk_rope_heads(torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]]), rope).k_TGW
        tensor([[[-4.,  3.]]])
    """
    if must_check(is_checked):
        _check_form(rope.form)
        _check_rows(qkv_TC, rope.form)
        _check_angles_and_weights(qkv_TC, rope)
    with no_graph():
        return choose_module(reference, qkv_TC).qk_rope_heads(qkv_TC, rope)


def qk_rope_backward(
    d_heads: Heads,
    qkv_TC: torch.Tensor | None,
    rope: Rope,
    *,
    needs_weight: bool,
    out: torch.Tensor | None = None,
    is_checked: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return the gradients of ``qk_rope_heads`` with respect to its input and the weights of the norms.

    The gradient is rotated back with the transposed map; the normed heads are recomputed from the raw heads. The
    rounding between norm and weight has gradient 1, as in autograd. Sums have a fixed order, so two calls are
    bit-equal.

    Args:
        d_heads: Gradients of the three outputs, of one dtype (bf16, fp16, fp32 or float64), each token's heads
            contiguous. Those of key and value heads may be shares that have yet to be summed.
        qkv_TC: The input of ``qk_rope_heads``. Read only with form.has_norm; may be None without.
        rope: As given to ``qk_rope_heads``.
        needs_weight: Return the gradients of the weights too; only with form.has_norm.
        out: Output tensor for d_raw_TC, only with form.has_gate: its gate columns are written already and not touched.
            It shares no memory with an input.
        is_checked: As in ``must_check``.

    Returns:
        d_raw_TC: Gradient of the forward's input, shape (T, C), dtype and device of d_heads; contiguous, or ``out``.
        d_q_weight_W: Shape (head_width,), sum over tokens and query heads, fp32 (float64 for float64); None unless
            needs_weight.
        d_k_weight_W: As d_q_weight_W, for the key heads.

    Raises:
        ShapeError: ``out`` shares memory with an input.
        OptionError: The form is unknown, or weights or ``out`` and form do not match.

    Cost:
        Reads d_heads (and the raw query and key heads) and writes d_raw_TC once. No host sync. needs_weight: at most 8
        KiB x head_width of partial sums, read once more. The reference makes fp32 copies.

    Example:
        >>> form = RopeForm(num_heads=1, num_kv_heads=1, head_width=2)
        >>> rope = Rope(torch.tensor([[0.0, 0.0]]), torch.tensor([[1.0, 1.0]]), None, None, form)
        >>> d_heads = Heads(*torch.tensor([[[[-2.0, 1.0]]], [[[-4.0, 3.0]]], [[[5.0, 6.0]]]]))
        >>> qk_rope_backward(d_heads, None, rope, needs_weight=False)[0]
        tensor([[1., 2., 3., 4., 5., 6.]])
    """
    if must_check(is_checked):
        _check_backward(d_heads, qkv_TC, rope, needs_weight=needs_weight, out=out)
    raw_TC = qkv_TC if rope.form.has_norm else None
    with no_graph():
        return choose_module(reference, d_heads.q_THW).qk_rope_backward(
            d_heads, raw_TC, rope, needs_weight=needs_weight, out=out
        )


def _check_backward(
    d_heads: Heads, qkv_TC: torch.Tensor | None, rope: Rope, *, needs_weight: bool, out: torch.Tensor | None
) -> None:
    """Raise on arguments that the backward would read wrongly."""
    form = rope.form
    _check_form(form)
    check_choice("needs_weight", needs_weight, (False, True))
    if needs_weight and not form.has_norm:
        raise OptionError(
            "needs_weight is True, but the form has no norm and therefore no weights. Pass needs_weight=False."
        )
    _check_heads(d_heads, form)
    like = d_heads.q_THW
    _check_angles_and_weights(like, rope)
    shape = (len(like), form.num_columns)
    if qkv_TC is not None:
        check_layout("qkv_TC", qkv_TC, shape, like=like, num_strided=1)
    elif form.has_norm:
        raise ShapeError("qkv_TC is None; the norm's gradient needs the heads that qk_rope_heads got. Pass them.")
    if form.has_gate is (out is None):
        raise OptionError("out must be given with form.has_gate, its gate columns written already, and only then.")
    if out is not None:
        check_out(out, like=like, shape=shape, may_be={}, must_not_meet=(*rope[:4], *d_heads, qkv_TC))


def _check_form(form: RopeForm) -> None:
    """Raise on an unknown form."""
    if not isinstance(form, RopeForm):
        raise OptionError(f"form must be a RopeForm, got {type(form).__name__}.")
    check_int("form.num_heads", form.num_heads, low=1)
    check_int("form.num_kv_heads", form.num_kv_heads, low=1)
    check_int("form.head_width", form.head_width, low=2, high=MAX_HEAD_WIDTH)
    check_int("form.rotary_width", form.num_rotated, low=2, high=form.head_width)
    if form.num_rotated % 2:
        raise OptionError(
            f"form.rotary_width is {form.num_rotated}; it must be an even number up to head_width {form.head_width}."
        )
    for name in ("has_norm", "is_weight_wide", "is_interleaved", "has_gate"):
        check_choice(f"form.{name}", getattr(form, name), (False, True))
    if form.has_norm:
        check_float("form.eps", form.eps, low=0.0)
        check_float("form.weight_offset", form.weight_offset, low=-float("inf"))


def _check_rows(qkv_TC: torch.Tensor, form: RopeForm) -> None:
    """Raise on shapes, dtypes, devices and layouts that the kernels cannot read."""
    check_layout("qkv_TC", qkv_TC, (None, None), dtypes=FLOATING, num_strided=1)
    if qkv_TC.shape[1] != form.num_columns:
        raise ShapeError(
            f"qkv_TC has {qkv_TC.shape[1]} columns; {form.num_heads} query heads"
            f"{' with gates' if form.has_gate else ''} and twice {form.num_kv_heads} key and value heads of width "
            f"{form.head_width} have {form.num_columns}. Concatenate q, k and v along the columns."
        )


def _check_heads(gradients: Heads, form: RopeForm) -> None:
    """Raise on gradients of other heads and on layouts that the kernels would read wrongly."""
    d_q_THW, d_k_TJW, d_v_TJW = gradients
    check_layout("d_q_THW", d_q_THW, (None, form.num_heads, form.head_width), dtypes=FLOATING, num_strided=1)
    check_layout("d_k_TJW", d_k_TJW, (len(d_q_THW), None, form.head_width), like=d_q_THW, num_strided=1)
    check_layout("d_v_TJW", d_v_TJW, d_k_TJW.shape, like=d_q_THW, num_strided=1)
    if d_k_TJW.shape[1] not in (form.num_kv_heads, form.num_heads) or d_k_TJW.shape[1] % form.num_kv_heads:
        raise ShapeError(
            f"d_k_TJW is {tuple(d_k_TJW.shape)}; it must have a head for each of {form.num_kv_heads} key heads, or for "
            f"each of {form.num_heads} query heads that share them evenly."
        )


def _check_angles_and_weights(like: torch.Tensor, rope: Rope) -> None:
    """Raise on angles and weights that do not belong to the tokens and the form."""
    cos_TW, sin_TW, q_weight_W, k_weight_W, form = rope
    angle_dtypes = {like.dtype, torch.float32}
    for name, angle_TW in (("cos_TW", cos_TW), ("sin_TW", sin_TW)):
        check_layout(name, angle_TW, (len(like), form.num_rotated), dtypes=angle_dtypes, like=like, num_strided=1)
    for name, weight_W in (("q_weight_W", q_weight_W), ("k_weight_W", k_weight_W)):
        if form.has_norm is (weight_W is None):
            raise OptionError(
                f"{name} is {'None' if weight_W is None else 'given'}, and form.has_norm is {form.has_norm}. Pass the "
                "weights of the norm with has_norm=True, and only then."
            )
        if weight_W is not None:
            check_layout(name, weight_W, (form.head_width,), dtypes={*TRITON_DTYPES, like.dtype}, like=like)
