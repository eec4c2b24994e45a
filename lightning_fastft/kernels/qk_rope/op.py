"""Norm and rotary embedding of query and key heads, and the gradient, each in one pass over a fused q, k, v projection.

Axes: T tokens; C columns of q, k and v side by side; W columns of a head, of cos and sin only the rotated ones.
Neither function is differentiable; the autograd Functions of layers call them.
"""

from __future__ import annotations

from types import ModuleType

import torch

from lightning_fastft.core.checks import (
    check_choice,
    check_columns,
    check_float,
    check_int,
    check_rows_apart,
    check_tensor,
    do_ranges_overlap,
    is_same_memory,
)
from lightning_fastft.core.errors import OptionError, ShapeError
from lightning_fastft.kernels.backends import TRITON_DTYPES, must_check, uses_triton
from lightning_fastft.kernels.qk_rope import reference
from lightning_fastft.kernels.qk_rope.reference import HeadGradients, Heads, RopeForm, RopeGradients

MAX_HEAD_WIDTH = 1024
_DTYPES = (*TRITON_DTYPES, torch.float64)


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
            replaceable, kept = () if form.has_norm else (qkv_TC,), (qkv_TC, cos_TW, sin_TW, q_weight_W, k_weight_W)
            _check_out(out, qkv_TC, device=qkv_TC.device, replaceable=replaceable, kept=kept)
    with torch.no_grad():
        return _choose(backend, qkv_TC).qk_rope_forward(
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
    with torch.no_grad():
        return _choose(backend, qkv_TC).qk_rope_heads(
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
    with torch.no_grad():
        return _choose(backend, first).qk_rope_backward(
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


def _choose(backend: str, x_TC: torch.Tensor) -> ModuleType:
    """Return the module of the backend."""
    if not uses_triton(backend, x_TC.device, dtype=x_TC.dtype):
        return reference
    from lightning_fastft.kernels.qk_rope import triton

    return triton


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
    _check_angles(cos_TW, sin_TW, qkv_TC, form, device=qkv_TC.device)
    _check_weights(q_weight_W, k_weight_W, qkv_TC, form, device=qkv_TC.device)


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
    raw_TC = qkv_TC if form.has_norm else None
    given: tuple[torch.Tensor, ...]
    if isinstance(d_heads, HeadGradients):
        _check_heads(d_heads, form)
        given, like_TC = (
            tuple(d_heads),
            d_heads.d_q_THW.new_empty((len(d_heads.d_q_THW), form.num_columns), device="meta"),
        )
    else:
        _check_rows("d_heads", d_heads, form)
        given, like_TC = (d_heads,), d_heads
    device = given[0].device
    _check_raw(qkv_TC, like_TC, form, device=device)
    _check_angles(cos_TW, sin_TW, like_TC, form, device=device)
    _check_weights(q_weight_W, k_weight_W, like_TC, form, device=device)
    if form.has_gate and (out is None or not isinstance(d_heads, HeadGradients)):
        raise OptionError("A form with gates needs HeadGradients, and an out whose gate columns are already written.")
    if out is not None:
        replaceable: tuple[torch.Tensor | None, ...]
        replaceable = (raw_TC,) if isinstance(d_heads, HeadGradients) else (d_heads, raw_TC)
        replaceable = () if form.has_gate else replaceable
        kept = (*given, raw_TC, cos_TW, sin_TW, q_weight_W, k_weight_W)
        _check_out(out, like_TC, device=device, replaceable=replaceable, kept=kept)


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
    check_tensor(name, x_TC, ndim=2, dtypes=_DTYPES)
    if x_TC.shape[1] != form.num_columns:
        raise ShapeError(
            f"{name} has {x_TC.shape[1]} columns; {form.num_heads} query heads{' with gates' if form.has_gate else ''} "
            f"and twice {form.num_kv_heads} key and value heads of width {form.head_width} have {form.num_columns}. "
            "Concatenate q, k and v along the columns."
        )
    check_columns(name, x_TC)


def _check_heads(gradients: HeadGradients, form: RopeForm) -> None:
    """Raise on gradients of other heads and on layouts that the kernels would read wrongly."""
    like = gradients.d_q_THW
    for name, d_THW in gradients._asdict().items():
        check_tensor(name, d_THW, ndim=3, dtypes=_DTYPES)
        counts = (form.num_heads,) if d_THW is like else (form.num_kv_heads, form.num_heads)
        if d_THW.shape[0] != like.shape[0] or d_THW.shape[1] not in counts or d_THW.shape[2] != form.head_width:
            heads = " or ".join(map(str, counts))
            raise ShapeError(
                f"{name} is {tuple(d_THW.shape)}; it must be ({like.shape[0]} tokens, {heads} heads, width "
                f"{form.head_width})."
            )
        if (d_THW.dtype, d_THW.device) != (like.dtype, like.device):
            raise ShapeError(
                f"{name} is {d_THW.dtype} on {d_THW.device}; it must match d_q_THW: {like.dtype} on {like.device}."
            )
        if d_THW.stride()[1:] != (form.head_width, 1):
            raise ShapeError(
                f"{name} has strides {d_THW.stride()}; the heads of a token must be contiguous: call .contiguous() on "
                "it."
            )
    if gradients.d_k_TJW.shape != gradients.d_v_TJW.shape:
        raise ShapeError(
            f"d_k_TJW is {tuple(gradients.d_k_TJW.shape)} and d_v_TJW {tuple(gradients.d_v_TJW.shape)}; their shapes "
            "must match."
        )
    if form.num_heads % form.num_kv_heads:
        raise ShapeError(f"{form.num_heads} query heads cannot share {form.num_kv_heads} key heads evenly.")


def _check_raw(qkv_TC: torch.Tensor | None, like_TC: torch.Tensor, form: RopeForm, *, device: torch.device) -> None:
    """Raise on raw heads that do not belong to the gradient."""
    if qkv_TC is None:
        if form.has_norm:
            raise ShapeError(
                "qkv_TC is None; the gradient of the norm needs the raw heads. Pass the qkv_TC that qk_rope_forward "
                "got."
            )
        return
    _check_rows("qkv_TC", qkv_TC, form)
    if (qkv_TC.shape, qkv_TC.dtype, qkv_TC.device) != (like_TC.shape, like_TC.dtype, device):
        raise ShapeError(
            f"d_heads has the shape {tuple(like_TC.shape)}, {like_TC.dtype} on {device}; it must match qkv_TC: "
            f"{tuple(qkv_TC.shape)}, {qkv_TC.dtype} on {qkv_TC.device}."
        )


def _check_angles(
    cos_TW: torch.Tensor, sin_TW: torch.Tensor, x_TC: torch.Tensor, form: RopeForm, *, device: torch.device
) -> None:
    """Raise on cos and sin of other tokens or other columns."""
    expected = (x_TC.shape[0], form.num_rotated)
    for name, angle_TW in (("cos_TW", cos_TW), ("sin_TW", sin_TW)):
        check_tensor(name, angle_TW, ndim=2, dtypes=dict.fromkeys((x_TC.dtype, torch.float32)))
        if angle_TW.shape != expected or angle_TW.device != device:
            raise ShapeError(
                f"{name} is {tuple(angle_TW.shape)} on {angle_TW.device}; it must be {expected} on {device}: one row "
                "per token, "
                f"one column per rotated column of a head."
            )
        check_columns(name, angle_TW)


def _check_weights(
    q_weight_W: torch.Tensor | None,
    k_weight_W: torch.Tensor | None,
    x_TC: torch.Tensor,
    form: RopeForm,
    *,
    device: torch.device,
) -> None:
    """Raise on weights without a norm, a norm without weights, and weights of another width."""
    for name, weight_W in (("q_weight_W", q_weight_W), ("k_weight_W", k_weight_W)):
        if weight_W is None:
            if form.has_norm:
                raise OptionError(
                    f"{name} is None, but the form has a norm. Pass the norm's weight, or a form with has_norm=False."
                )
            continue
        if not form.has_norm:
            raise OptionError(
                f"{name} was given, but the form has no norm and would ignore it. Pass None, or a form with "
                "has_norm=True."
            )
        check_tensor(name, weight_W, ndim=1, dtypes=dict.fromkeys((*TRITON_DTYPES, x_TC.dtype)))
        if weight_W.shape[0] != form.head_width or weight_W.device != device:
            raise ShapeError(
                f"{name} has {weight_W.shape[0]} entries on {weight_W.device}; it must have head_width = "
                f"{form.head_width} on {device}: "
                f"a norm over all heads together is another operation."
            )
        if weight_W.stride(0) != 1:
            raise ShapeError(
                f"{name} has stride {weight_W.stride(0)}; it must be contiguous: call .contiguous() on it."
            )


def _check_out(
    out: torch.Tensor,
    like_TC: torch.Tensor,
    *,
    device: torch.device,
    replaceable: tuple[torch.Tensor | None, ...],
    kept: tuple[torch.Tensor | None, ...],
) -> None:
    """Raise on memory that one program would write before another has read it."""
    check_tensor("out", out, ndim=2, dtypes=(like_TC.dtype,))
    if out.shape != like_TC.shape or out.device != device:
        raise ShapeError(f"out is {tuple(out.shape)} on {out.device}; it must be {tuple(like_TC.shape)} on {device}.")
    check_columns("out", out)
    check_rows_apart("out", out)
    same = [other for other in replaceable if other is not None and is_same_memory(out, other)]
    for other in kept:
        is_replaced = any(other is one for one in same)
        if other is not None and not is_replaced and do_ranges_overlap(out, other):
            raise ShapeError(
                "out shares memory with an input that must not change. Give separate memory, None, or an input "
                "that may be overwritten."
            )
