"""Cross-entropy of the labelled rows of a pack, in chunks: full logits never exist, and the gradient is formed in the
forward.

Axes: T tokens of the pack, D model width, V vocabulary, R labelled rows (padded to a bucket; the first num_rows count).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from lightning_fastft.core.checks import check_int, check_tensor
from lightning_fastft.core.errors import OptionError, ShapeError
from lightning_fastft.kernels.cross_entropy import reference
from lightning_fastft.kernels.cross_entropy.reference import RowLosses

# Rows of logits that exist at a time: 2048 x 151,936 bf16 are 0.6 GiB and keep the GEMMs at full rate (speed.md, B6).
DEFAULT_CHUNK_ROWS = 2048


class _Rows(NamedTuple):
    """Rows, targets and the form of the logits: the arguments without gradient."""

    row_R: torch.Tensor | None
    target_R: torch.Tensor
    num_rows: int
    num_items: float | torch.Tensor
    scale: float
    softcap: float | None
    chunk_rows: int


def labelled_cross_entropy(
    hidden_TD: torch.Tensor,
    weight_VD: torch.Tensor,
    *,
    row_R: torch.Tensor | None,
    target_R: torch.Tensor,
    num_rows: int,
    num_items: float | torch.Tensor,
    bias_V: torch.Tensor | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
    chunk_rows: int = DEFAULT_CHUNK_ROWS,
) -> torch.Tensor:
    """Return the summed cross-entropy of the first num_rows rows, divided by num_items.

    The GEMMs run in the dtype of hidden_TD (under autocast in its dtype), softmax and sums in fp32. The power of two in
    num_items divides gradients only in the backward, so that nothing underflows in fp16. A weight that requires a
    gradient gets it, summed over the chunks in fp32.

    Args:
        hidden_TD: Last hidden states. Shape (T, D); bf16, fp16, fp32 or float64.
        weight_VD: Weight of the head. Shape (V, D); dtype of hidden_TD.
        row_R: Rows of hidden_TD that are trained, int64, each at most once among the first num_rows; None for rows 0 to
            num_rows - 1.
        target_R: Token that each row is trained towards, int64; -100 leaves a row out.
        num_rows: Rows that count; those behind are padding.
        num_items: What the sum is divided by, above 0; a 0-dim tensor on the device is taken without a wait.
        bias_V: Bias of the head.
        scale: Factor on the logits.
        softcap: Logits become ``softcap * tanh(logits / softcap)`` after the scale; None for no cap.
        chunk_rows: Rows of logits that exist at a time.

    Returns:
        Loss, 0-dim, fp32 (float64 for float64 states), with a graph where an input requires a gradient. With no rows: 0
        and gradients of 0.

    Raises:
        ShapeError: Shapes or dtypes do not fit.
        OptionError: num_rows, num_items, softcap or chunk_rows is out of range.

    Cost:
        2 V D FLOP per row each for the logits, the gradient of the states and the gradient of the weight. Memory:
        chunk_rows x V logits; with a gradient, R x D states for the backward, and V x D in fp32 if the weight is
        trained. No host sync.

    Source:
        Gradient in the forward: Liger kernel (arXiv 2410.10989); rows without a label are left out, own.

    Example:
        >>> hidden, weight = torch.zeros(3, 2), torch.zeros(4, 2)
        >>> rows = {"row_R": torch.tensor([0]), "target_R": torch.tensor([1]), "num_rows": 1}
        >>> loss = labelled_cross_entropy(hidden, weight, **rows, num_items=1.0)
        >>> round(loss.item(), 4)
        1.3863
    """
    rows = _check(hidden_TD, weight_VD, bias_V, _Rows(row_R, target_R, num_rows, num_items, scale, softcap, chunk_rows))
    inputs = (hidden_TD, weight_VD, bias_V)
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in inputs):
        return _LabelledCrossEntropy.apply(*inputs, rows)
    nll_sum, _ = _sum_statistics(hidden_TD, weight_VD, bias_V, rows, count_correct=False)
    return nll_sum / num_items


def token_statistics(
    hidden_TD: torch.Tensor,
    weight_VD: torch.Tensor,
    *,
    row_R: torch.Tensor | None,
    target_R: torch.Tensor,
    num_rows: int,
    bias_V: torch.Tensor | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
    chunk_rows: int = DEFAULT_CHUNK_ROWS,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the summed negative log-likelihood and the number of rows whose likeliest token is the target.

    Takes the arguments of ``labelled_cross_entropy`` and never builds a graph. Among equal logits the lowest token
    counts as the likeliest.

    Returns:
        nll_sum: 0-dim, fp32 (float64 for float64 states), on the device of hidden_TD.
        num_correct: 0-dim, int64, on the same device.

    Cost:
        2 V D FLOP per row; chunk_rows x V logits; no host sync.
    """
    rows = _check(hidden_TD, weight_VD, bias_V, _Rows(row_R, target_R, num_rows, 1.0, scale, softcap, chunk_rows))
    with torch.no_grad():
        return _sum_statistics(hidden_TD, weight_VD, bias_V, rows, count_correct=True)


class _LabelledCrossEntropy(torch.autograd.Function):
    """Saves the gradient of the trained rows, and of weight and bias where they are trained, before its power of
    two; neither logits nor states.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden_TD: torch.Tensor, weight_VD: torch.Tensor, bias_V: torch.Tensor | None, rows: _Rows
    ) -> torch.Tensor:
        needs_hidden, needs_weight, needs_bias, _ = ctx.needs_input_grad
        wide = _wide_dtype(hidden_TD.dtype)
        device = hidden_TD.device
        num_padded = rows.target_R.shape[0]
        d_row_RD = (
            torch.empty(num_padded, hidden_TD.shape[1], dtype=_compute_dtype(hidden_TD), device=device)
            if needs_hidden
            else None
        )
        d_weight_VD = torch.zeros(weight_VD.shape, dtype=wide, device=device) if needs_weight else None
        d_bias_V = torch.zeros(weight_VD.shape[0], dtype=wide, device=device) if needs_bias else None
        nll_R = torch.zeros(num_padded, dtype=wide, device=device)
        gradient_factor, ctx.divisor = _split_divisor(rows.num_items)

        for chunk in _chunks(hidden_TD, weight_VD, bias_V, rows):
            losses = _row_losses(chunk, rows, gradient_factor=gradient_factor, count_correct=False)
            nll_R[chunk.begin : chunk.end] = losses.nll_R
            with torch.autocast(device.type, enabled=False):
                if d_row_RD is not None:
                    torch.mm(chunk.logits_RV, chunk.weight_VD, out=d_row_RD[chunk.begin : chunk.end])
                if d_weight_VD is not None:
                    _add_product(d_weight_VD, chunk.logits_RV.T, chunk.hidden_RD)
                if d_bias_V is not None:
                    d_bias_V += chunk.logits_RV.sum(dim=0, dtype=wide)

        ctx.save_for_backward(rows.row_R, d_row_RD, d_weight_VD, d_bias_V)
        ctx.num_rows = rows.num_rows
        ctx.hidden_shape, ctx.hidden_dtype = hidden_TD.shape, hidden_TD.dtype
        ctx.weight_dtype = weight_VD.dtype
        ctx.bias_dtype = None if bias_V is None else bias_V.dtype
        return nll_R.sum() / rows.num_items

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_loss: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        row_R, d_row_RD, d_weight_VD, d_bias_V = ctx.saved_tensors
        num_rows = ctx.num_rows
        factor = d_loss / ctx.divisor
        d_hidden_TD = None
        if d_row_RD is not None:
            d_trained_RD = _multiply(d_row_RD[:num_rows], factor, dtype=ctx.hidden_dtype)
            d_hidden_TD = torch.zeros(ctx.hidden_shape, dtype=ctx.hidden_dtype, device=d_trained_RD.device)
            if row_R is None:
                d_hidden_TD[:num_rows] = d_trained_RD
            else:
                # Each row appears once, so the copy has one writer per row.
                d_hidden_TD.index_copy_(0, row_R[:num_rows], d_trained_RD)
        d_weight = None if d_weight_VD is None else _multiply(d_weight_VD, factor, dtype=ctx.weight_dtype)
        d_bias = None if d_bias_V is None else _multiply(d_bias_V, factor, dtype=ctx.bias_dtype)
        return d_hidden_TD, d_weight, d_bias, None


class _Chunk(NamedTuple):
    """Rows begin to end: their states, their raw logits (a buffer that the next chunk reuses), and the weight in
    the dtype of both.
    """

    begin: int
    end: int
    hidden_RD: torch.Tensor
    logits_RV: torch.Tensor
    weight_VD: torch.Tensor
    target_R: torch.Tensor


def _chunks(
    hidden_TD: torch.Tensor, weight_VD: torch.Tensor, bias_V: torch.Tensor | None, rows: _Rows
) -> Iterator[_Chunk]:
    """Yield the raw logits of the rows, chunk by chunk, in one reused buffer."""
    if rows.num_rows == 0:
        return
    dtype = _compute_dtype(hidden_TD)
    weight_VD = weight_VD.to(dtype)
    bias_V = None if bias_V is None else bias_V.to(dtype)
    num_buffer_rows = min(rows.chunk_rows, rows.target_R.shape[0])
    buffer_RV = torch.empty(num_buffer_rows, weight_VD.shape[0], dtype=dtype, device=hidden_TD.device)
    for begin in range(0, rows.num_rows, rows.chunk_rows):
        end = min(begin + rows.chunk_rows, rows.num_rows)
        hidden_RD = hidden_TD[begin:end] if rows.row_R is None else hidden_TD.index_select(0, rows.row_R[begin:end])
        hidden_RD = hidden_RD.to(dtype)
        logits_RV = buffer_RV[: end - begin]
        with torch.autocast(hidden_TD.device.type, enabled=False):
            if bias_V is None:
                torch.mm(hidden_RD, weight_VD.T, out=logits_RV)
            else:
                torch.addmm(bias_V, hidden_RD, weight_VD.T, out=logits_RV)
        yield _Chunk(begin, end, hidden_RD, logits_RV, weight_VD, rows.target_R[begin:end])


def _sum_statistics(
    hidden_TD: torch.Tensor, weight_VD: torch.Tensor, bias_V: torch.Tensor | None, rows: _Rows, *, count_correct: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum losses and hits over all chunks, without gradients."""
    wide = _wide_dtype(hidden_TD.dtype)
    nll_sum = torch.zeros((), dtype=wide, device=hidden_TD.device)
    num_correct = torch.zeros((), dtype=torch.int64, device=hidden_TD.device)
    with torch.no_grad():
        for chunk in _chunks(hidden_TD, weight_VD, bias_V, rows):
            losses = _row_losses(chunk, rows, gradient_factor=None, count_correct=count_correct)
            nll_sum = nll_sum + losses.nll_R.sum()
            if losses.correct_R is not None:
                num_correct = num_correct + losses.correct_R.sum()
    return nll_sum, num_correct


def _row_losses(chunk: _Chunk, rows: _Rows, *, gradient_factor: float | None, count_correct: bool) -> RowLosses:
    """Run the Triton kernel on narrow logits on CUDA, and its reference in PyTorch elsewhere: fp32 is not to meet the
    hardware's approximate exp.
    """
    launch = reference.row_losses
    if chunk.logits_RV.is_cuda and chunk.logits_RV.dtype in (torch.bfloat16, torch.float16):
        from lightning_fastft.kernels.cross_entropy import triton

        launch = triton.row_losses
    return launch(
        chunk.logits_RV,
        chunk.target_R,
        scale=rows.scale,
        softcap=rows.softcap,
        gradient_factor=gradient_factor,
        count_correct=count_correct,
    )


def _split_divisor(num_items: float | torch.Tensor) -> tuple[float, float | torch.Tensor]:
    """Split 1 / num_items into a factor between 1 and 2 and a divisor that is a power of two.

    The factor is applied before gradients are rounded to a narrow dtype, the divisor after: dividing by a power of two
    rounds nothing, and fp16 keeps small gradients until the loss scale has come in.
    """
    if isinstance(num_items, torch.Tensor):
        return 1.0, num_items
    mantissa, exponent = math.frexp(num_items)
    return 1.0 / mantissa, 2.0**exponent


def _add_product(sum_VD: torch.Tensor, left_VR: torch.Tensor, right_RD: torch.Tensor) -> None:
    """Add left x right to a wide sum, without rounding the product to the narrow dtype of its factors."""
    if left_VR.dtype is sum_VD.dtype:
        sum_VD.addmm_(left_VR, right_RD)
    elif left_VR.is_cuda:
        torch.addmm(sum_VD, left_VR, right_RD, out_dtype=sum_VD.dtype, out=sum_VD)
    else:
        sum_VD.addmm_(left_VR.to(sum_VD.dtype), right_RD.to(sum_VD.dtype))


def _multiply(tensor: torch.Tensor, factor: torch.Tensor, *, dtype: torch.dtype) -> torch.Tensor:
    """Return tensor x factor, multiplied in the factor's fp32: a 0-dim factor would be rounded to a narrow
    tensor's dtype first.
    """
    return torch.mul(tensor, factor.reshape([1] * tensor.ndim), out=torch.empty_like(tensor, dtype=dtype))


def _compute_dtype(hidden_TD: torch.Tensor) -> torch.dtype:
    """Return the dtype of the GEMMs: the dtype of the states, or autocast's."""
    device_type = hidden_TD.device.type
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else hidden_TD.dtype


def _wide_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32


def _check(hidden_TD: torch.Tensor, weight_VD: torch.Tensor, bias_V: torch.Tensor | None, rows: _Rows) -> _Rows:
    """Refuse what the loop and the kernel would read wrongly."""
    floating = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
    check_tensor("hidden_TD", hidden_TD, ndim=2, dtypes=floating)
    check_tensor("weight_VD", weight_VD, ndim=2, dtypes=floating)
    check_tensor("target_R", rows.target_R, ndim=1, dtypes=(torch.int64,))
    if hidden_TD.shape[1] != weight_VD.shape[1]:
        raise ShapeError(f"hidden_TD has width {hidden_TD.shape[1]}, weight_VD has {weight_VD.shape[1]}.")
    if hidden_TD.dtype is not weight_VD.dtype and not torch.is_autocast_enabled(hidden_TD.device.type):
        raise ShapeError(
            f"hidden_TD is {hidden_TD.dtype} and weight_VD is {weight_VD.dtype}; cast one of them or train under "
            "autocast."
        )
    if bias_V is not None and bias_V.shape != weight_VD.shape[:1]:
        raise ShapeError(f"bias_V has shape {tuple(bias_V.shape)}, weight_VD has {weight_VD.shape[0]} rows.")
    limit = rows.target_R.shape[0]
    if rows.row_R is None:
        limit = min(limit, hidden_TD.shape[0])
    elif check_tensor("row_R", rows.row_R, ndim=1, dtypes=(torch.int64,)).shape != rows.target_R.shape:
        raise ShapeError(f"row_R has {rows.row_R.shape[0]} entries, target_R has {rows.target_R.shape[0]}.")
    check_int("num_rows", rows.num_rows, low=0, high=limit)
    check_int("chunk_rows", rows.chunk_rows, low=1)
    if not isinstance(rows.num_items, torch.Tensor) and not 0 < rows.num_items < float("inf"):
        raise OptionError(f"num_items must be a finite number above 0, got {rows.num_items}.")
    if rows.softcap is not None and rows.softcap == 0:
        raise OptionError("softcap must not be 0; None turns it off.")
    return rows
