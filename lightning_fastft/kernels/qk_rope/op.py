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
from lightning_fastft.kernels.qk_rope.reference import HeadGradients, Heads, RopeForm, RopeGradients

MAX_HEAD_WIDTH = 1024


def qk_rope_forward(
    qkv_TC: torch.Tensor,
    cos_TW: torch.Tensor,
    sin_TW: torch.Tensor,
    *,
    form: RopeForm,
    q_weight_W: torch.Tensor | None = None,
    k_weight_W: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    backend: str = "auto",
    is_checked: bool = True,
) -> torch.Tensor:
    """Return the projection with normed and rotated query and key heads, and unchanged value heads.

    The arithmetic is fp32 (float64 for float64). Each value is rounded once, and once more if the form rounds before
    the norm's weight. Tokens are independent, so NaN stays in its row.

    Args:
        qkv_TC: Output of the fused projection. Shape (T, (num_heads + 2 num_kv_heads) head_width): query, key, value
            heads; bf16, fp16, fp32 or float64; last axis contiguous, any row stride. No gates.
        cos_TW: Output of the model's rotary embedding, without the batch axis. Shape (T, rotary_width); dtype of qkv_TC
            or fp32; last axis contiguous. Interleaved forms read the first half only, one value per pair, as GLM-4 and
            ERNIE 4.5 do. A model that repeats each value (Cohere) passes ``torch.cat([cos[:, ::2]] * 2, dim=1)``.
        sin_TW: As cos_TW.
        form: Positions of the heads, whether they are normed, and how columns are paired.
        q_weight_W: Weight of the query heads' norm. Shape (head_width,), contiguous; bf16, fp16, fp32 or qkv_TC's
            dtype; only with form.has_norm.
        k_weight_W: As q_weight_W, for the key heads.
        out: Output tensor: a tensor like qkv_TC, or qkv_TC itself if the form has no norm (the norm's gradient needs
            the raw heads). None for new memory.
        backend: "triton" (CUDA; not for float64), "reference" (plain PyTorch), or "auto": the first if possible, else
            the second.
        is_checked: Validate the arguments. Pass False only for arguments that are known to be valid.

    Returns:
        qkv_TC: Shape, dtype and device of the input; contiguous, or ``out``; no graph.

    Raises:
        ShapeError: A shape, dtype, device or layout is wrong, or ``out`` shares memory that is still read.
        OptionError: The form or backend is unknown, weights and form do not match, or the backend does not support
            these tensors.

    Cost:
        Reads and writes qkv_TC once; in place, the value heads are not touched. No host sync. "reference" makes fp32
        copies.

    Source:
        RoFormer, arXiv 2104.09864; RMSNorm, arXiv 1910.07467; ``apply_rotary_pos_emb`` of transformers.

    Example:
        >>> form = RopeForm(num_heads=1, num_kv_heads=1, head_width=2)
        >>> cos, sin = torch.tensor([[0.0, 0.0]]), torch.tensor([[1.0, 1.0]])
        >>> qk_rope_forward(torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]]), cos, sin, form=form)
        tensor([[-2.,  1., -4.,  3.,  5.,  6.]])
    """
    if must_check(is_checked):
        _check_forward(qkv_TC, cos_TW, sin_TW, form, q_weight_W, k_weight_W)
        if form.has_gate:
            raise OptionError("qk_rope_forward does not support gates; call qk_rope_heads.")
        if out is not None:
            check_layout("out", out, qkv_TC.shape, like=qkv_TC, num_strided=1)
            raw_TC, may_be = (qkv_TC, {}) if form.has_norm else (None, {"qkv_TC": qkv_TC})
            check_out(out, may_be=may_be, must_not_meet=(raw_TC, cos_TW, sin_TW, q_weight_W, k_weight_W))
    with no_graph():
        return choose_module(reference, backend, qkv_TC).qk_rope_forward(
            qkv_TC, cos_TW, sin_TW, form=form, q_weight_W=q_weight_W, k_weight_W=k_weight_W, out=out
        )


def qk_rope_heads(
    qkv_TC: torch.Tensor,
    cos_TW: torch.Tensor,
    sin_TW: torch.Tensor,
    *,
    form: RopeForm,
    q_weight_W: torch.Tensor | None = None,
    k_weight_W: torch.Tensor | None = None,
    backend: str = "auto",
    is_checked: bool = True,
) -> Heads:
    """Return normed and rotated queries and keys, and unchanged values, in three contiguous tensors for attention.

    The values are equal to the result of ``qk_rope_forward``.

    Args:
        qkv_TC: As in ``qk_rope_forward``, with gates if the form has them.
        cos_TW: As in ``qk_rope_forward``.
        sin_TW: As cos_TW.
        form: Positions of the heads, whether they are normed, and how columns are paired.
        q_weight_W: As in ``qk_rope_forward``.
        k_weight_W: As q_weight_W, for the key heads.
        backend: As in ``qk_rope_forward``.
        is_checked: Validate the arguments. Pass False only for arguments that are known to be valid.

    Returns:
        q_THW: Shape (T, num_heads, head_width), dtype and device of qkv_TC; contiguous; no graph.
        k_TGW: Shape (T, num_kv_heads, head_width).
        v_TGW: As k_TGW.

    Raises:
        ShapeError: As in ``qk_rope_forward``.
        OptionError: As in ``qk_rope_forward``.

    Cost:
        Reads and writes qkv_TC once; no host sync. "reference" makes fp32 copies.

    Source:
        As ``qk_rope_forward``.

    Example:
        >>> form = RopeForm(num_heads=1, num_kv_heads=1, head_width=2)
        >>> cos, sin = torch.tensor([[0.0, 0.0]]), torch.tensor([[1.0, 1.0]])
        >>> qk_rope_heads(torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]]), cos, sin, form=form).k_TGW
        tensor([[[-4.,  3.]]])
    """
    if must_check(is_checked):
        _check_forward(qkv_TC, cos_TW, sin_TW, form, q_weight_W, k_weight_W)
    with no_graph():
        return choose_module(reference, backend, qkv_TC).qk_rope_heads(
            qkv_TC, cos_TW, sin_TW, form=form, q_weight_W=q_weight_W, k_weight_W=k_weight_W
        )


def qk_rope_backward(
    d_heads: torch.Tensor | HeadGradients,
    qkv_TC: torch.Tensor | None,
    cos_TW: torch.Tensor,
    sin_TW: torch.Tensor,
    *,
    form: RopeForm,
    q_weight_W: torch.Tensor | None = None,
    k_weight_W: torch.Tensor | None = None,
    needs_weight: bool,
    out: torch.Tensor | None = None,
    backend: str = "auto",
    is_checked: bool = True,
) -> RopeGradients:
    """Return the gradients of ``qk_rope_forward`` with respect to its input and the weights of the norms.

    The gradient is rotated back with the transposed map; the normed heads are recomputed from the raw heads. The
    rounding between norm and weight has gradient 1, as in autograd. Sums have a fixed order, so two calls are
    bit-equal.

    Args:
        d_heads: Gradient of the forward's output. Shape (T, C); bf16, fp16, fp32 or float64; last axis contiguous. Or
            HeadGradients: three tensors of one dtype, each token's heads contiguous, whose key and value heads may be
            shares that have yet to be summed.
        qkv_TC: The input of ``qk_rope_forward``, not its output. Read only with form.has_norm; may be None without.
        cos_TW: As given to ``qk_rope_forward``.
        sin_TW: As given to ``qk_rope_forward``.
        form: As given to ``qk_rope_forward``.
        q_weight_W: As given to ``qk_rope_forward``.
        k_weight_W: As given to ``qk_rope_forward``.
        needs_weight: Return the gradients of the weights too; only with form.has_norm.
        out: Output tensor for d_raw_TC: a tensor like d_raw_TC, or d_heads (if it is one tensor) or qkv_TC itself,
            which is overwritten. None for new memory. A form with gates needs a tensor that is not an input; the
            gate columns are not touched.
        backend: As in ``qk_rope_forward``.
        is_checked: Validate the arguments. Pass False only for arguments that are known to be valid.

    Returns:
        d_raw_TC: Gradient of the forward's input, shape (T, C), dtype and device of d_heads; contiguous, or ``out``.
        d_q_weight_W: Shape (head_width,), sum over tokens and query heads, fp32 (float64 for float64); None unless
            needs_weight.
        d_k_weight_W: As d_q_weight_W, for the key heads.

    Raises:
        ShapeError: A shape, dtype, device or layout is wrong, or ``out`` shares memory that is still read.
        OptionError: The form or backend is unknown, weights and form do not match, or the backend does not support
            these tensors.

    Cost:
        Reads d_heads (and the raw query and key heads) and writes d_raw_TC once; in place, the value heads are not
        touched. No host sync. needs_weight: at most 8 KiB x head_width of partial sums, read once more. "reference"
        makes fp32 copies.

    Source:
        The chain rule.

    Example:
        >>> form = RopeForm(num_heads=1, num_kv_heads=1, head_width=2)
        >>> cos, sin = torch.tensor([[0.0, 0.0]]), torch.tensor([[1.0, 1.0]])
        >>> d_heads = torch.tensor([[-2.0, 1.0, -4.0, 3.0, 5.0, 6.0]])
        >>> qk_rope_backward(d_heads, None, cos, sin, form=form, needs_weight=False).d_raw_TC
        tensor([[1., 2., 3., 4., 5., 6.]])
    """
    if must_check(is_checked):
        _check_backward(
            d_heads, qkv_TC, cos_TW, sin_TW, form, q_weight_W, k_weight_W, needs_weight=needs_weight, out=out
        )
    raw_TC = qkv_TC if form.has_norm else None
    first = d_heads.d_q_THW if isinstance(d_heads, HeadGradients) else d_heads
    with no_graph():
        return choose_module(reference, backend, first).qk_rope_backward(
            d_heads,
            raw_TC,
            cos_TW,
            sin_TW,
            form=form,
            q_weight_W=q_weight_W,
            k_weight_W=k_weight_W,
            needs_weight=needs_weight,
            out=out,
        )


def _check_forward(
    qkv_TC: torch.Tensor,
    cos_TW: torch.Tensor,
    sin_TW: torch.Tensor,
    form: RopeForm,
    q_weight_W: torch.Tensor | None,
    k_weight_W: torch.Tensor | None,
) -> None:
    """Raise on inputs that the forward cannot read."""
    _check_form(form)
    _check_rows("qkv_TC", qkv_TC, form)
    _check_angles_and_weights(qkv_TC, cos_TW, sin_TW, form, q_weight_W, k_weight_W)


def _check_backward(
    d_heads: torch.Tensor | HeadGradients,
    qkv_TC: torch.Tensor | None,
    cos_TW: torch.Tensor,
    sin_TW: torch.Tensor,
    form: RopeForm,
    q_weight_W: torch.Tensor | None,
    k_weight_W: torch.Tensor | None,
    *,
    needs_weight: bool,
    out: torch.Tensor | None,
) -> None:
    """Raise on arguments that the backward would read wrongly."""
    _check_form(form)
    check_choice("needs_weight", needs_weight, (False, True))
    if needs_weight and not form.has_norm:
        raise OptionError(
            "needs_weight is True, but the form has no norm and therefore no weights. Pass needs_weight=False."
        )
    kept: tuple[torch.Tensor | None, ...] = (cos_TW, sin_TW, q_weight_W, k_weight_W)
    may_be: dict[str, torch.Tensor | None] = {"qkv_TC": qkv_TC} if form.has_norm else {}
    if isinstance(d_heads, HeadGradients):
        _check_heads(d_heads, form)
        like, kept = d_heads.d_q_THW, (*kept, *d_heads)
    else:
        _check_rows("d_heads", d_heads, form)
        like = may_be["d_heads"] = d_heads
    _check_angles_and_weights(like, cos_TW, sin_TW, form, q_weight_W, k_weight_W)
    shape = (len(like), form.num_columns)
    if qkv_TC is not None:
        check_layout("qkv_TC", qkv_TC, shape, like=like, num_strided=1)
    elif form.has_norm:
        raise ShapeError("qkv_TC is None; the norm's gradient needs the heads that qk_rope_forward got. Pass them.")
    if form.has_gate and (out is None or not isinstance(d_heads, HeadGradients)):
        raise OptionError("A form with gates needs HeadGradients, and an out whose gate columns are already written.")
    if out is not None:
        check_layout("out", out, shape, like=like, num_strided=1)
        if form.has_gate:
            kept, may_be = (*kept, *may_be.values()), {}
        check_out(out, may_be=may_be, must_not_meet=kept)


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


def _check_rows(name: str, x_TC: torch.Tensor, form: RopeForm) -> None:
    """Raise on shapes, dtypes, devices and layouts that the kernels cannot read."""
    check_layout(name, x_TC, (None, None), dtypes=FLOATING, num_strided=1)
    if x_TC.shape[1] != form.num_columns:
        raise ShapeError(
            f"{name} has {x_TC.shape[1]} columns; {form.num_heads} query heads{' with gates' if form.has_gate else ''} "
            f"and twice {form.num_kv_heads} key and value heads of width {form.head_width} have {form.num_columns}. "
            "Concatenate q, k and v along the columns."
        )


def _check_heads(gradients: HeadGradients, form: RopeForm) -> None:
    """Raise on gradients of other heads and on layouts that the kernels would read wrongly."""
    d_q_THW, d_k_TJW, d_v_TJW = gradients
    check_layout("d_q_THW", d_q_THW, (None, form.num_heads, form.head_width), dtypes=FLOATING, num_strided=1)
    check_layout("d_k_TJW", d_k_TJW, (len(d_q_THW), None, form.head_width), like=d_q_THW, num_strided=1)
    check_layout("d_v_TJW", d_v_TJW, d_k_TJW.shape, like=d_q_THW, num_strided=1)
    if form.num_heads % form.num_kv_heads:
        raise ShapeError(f"{form.num_heads} query heads cannot share {form.num_kv_heads} key heads evenly.")
    if d_k_TJW.shape[1] not in (form.num_kv_heads, form.num_heads):
        raise ShapeError(
            f"d_k_TJW is {tuple(d_k_TJW.shape)}; it must have {form.num_kv_heads} or {form.num_heads} heads."
        )


def _check_angles_and_weights(
    like: torch.Tensor,
    cos_TW: torch.Tensor,
    sin_TW: torch.Tensor,
    form: RopeForm,
    q_weight_W: torch.Tensor | None,
    k_weight_W: torch.Tensor | None,
) -> None:
    """Raise on angles and weights that do not belong to the tokens and the form."""
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
