"""Divergences of rows of logits on a GPU: the formulas of reference.py, value and gradient in one kernel.

Axes: R labelled rows (one program each), V vocabulary (walked in tiles of DEPTH times LANES columns).
Columns that are a multiple of LANES apart share one lane, as in cross_entropy. The first walk computes the sums of
exponentials, the second the divergence, and the third overwrites the student's logits with the gradient. The gradient
of the forward KL divergence needs no other sum over the row, so the second walk writes it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lightning_fastft.kernels.cross_entropy.triton import scale_and_cap, slope_of_cap
from lightning_fastft.kernels.divergence.reference import KINDS, DivergenceForm
from lightning_fastft.kernels.launch import launch
from lightning_fastft.kernels.sizes import ceil_div, next_power_of_2

# Half of cross_entropy's tile, because the teacher's logits are held too. Candidates, not yet measured on a device:
# python -m benchmarks.row_kernels --only divergence --tiles.
MAX_LANES = 2048
MAX_DEPTH = 2
NUM_WARPS = 8

_FORWARD_KL, _REVERSE_KL, _JSD = (tl.constexpr(KINDS.index(kind)) for kind in ("forward_kl", "reverse_kl", "jsd"))
# Below every logit except -inf. A lane that has seen only -inf computes -inf minus this value, never -inf minus -inf.
_LOWEST = tl.constexpr(torch.finfo(torch.float32).min)


@triton.jit
def _load(row_ptr, cols, num_columns, scale, softcap, HAS_SOFTCAP: tl.constexpr):
    """Return raw logits, and logits after scale and soft cap, -inf outside of the row."""
    inside = cols < num_columns
    raw = tl.load(row_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    return raw, tl.where(inside, scale_and_cap(raw, scale, softcap, HAS_SOFTCAP), -float("inf"))


@triton.jit
def _add_tile(value, lane_highest, lane_total):
    """Add a tile to each lane's maximum and sum of exponentials of differences from it."""
    new_highest = tl.maximum(lane_highest, tl.max(value, axis=0))
    lane_total = lane_total * tl.exp(lane_highest - new_highest)
    return new_highest, lane_total + tl.sum(tl.exp(value - new_highest[None, :]), axis=0)


@triton.jit
def _join_lanes(lane_highest, lane_total):
    """Return a row's maximum and the logarithm of its sum of exponentials of differences from it."""
    highest = tl.max(lane_highest, axis=0)
    return highest, tl.log(tl.sum(lane_total * tl.exp(lane_highest - highest), axis=0))


@triton.jit
def _share_times(share, factor):
    """Return share x factor; 0 where the share is 0, even if the factor is infinite or NaN."""
    return tl.where(share == 0.0, 0.0, share * factor)


@triton.jit
def _store_gradient(row_ptr, cols, num_columns, gradient, raw, scale, softcap, HAS_SOFTCAP: tl.constexpr):
    """Write the gradient of raw logits, given the gradient of scaled and capped logits."""
    gradient *= scale
    if HAS_SOFTCAP:
        gradient *= slope_of_cap(raw, scale, softcap)
    tl.store(row_ptr + cols, gradient.to(row_ptr.dtype.element_ty), mask=cols < num_columns)


@triton.jit
def _divergence_kernel(
    logits_ptr,
    teacher_ptr,
    divergence_ptr,
    row_stride,
    teacher_row_stride,
    num_columns,
    beta,
    scale,
    softcap,
    teacher_scale,
    teacher_softcap,
    KIND: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_TEACHER_SOFTCAP: tl.constexpr,
    WRITE_GRADIENT: tl.constexpr,
    DEPTH: tl.constexpr,
    LANES: tl.constexpr,
):
    """Run one program per row. q are the student's probabilities, p the teacher's, m their mixture."""
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * row_stride
    teacher_row_ptr = teacher_ptr + row * teacher_row_stride
    tile_cols = tl.arange(0, DEPTH)[:, None] * LANES + tl.arange(0, LANES)[None, :]

    lane_highest = tl.full((LANES,), _LOWEST, tl.float32)
    lane_total = tl.zeros((LANES,), tl.float32)
    lane_teacher_highest = tl.full((LANES,), _LOWEST, tl.float32)
    lane_teacher_total = tl.zeros((LANES,), tl.float32)
    for start in range(0, num_columns, DEPTH * LANES):
        cols = start + tile_cols
        _, value = _load(row_ptr, cols, num_columns, scale, softcap, HAS_SOFTCAP)
        lane_highest, lane_total = _add_tile(value, lane_highest, lane_total)
        _, value = _load(teacher_row_ptr, cols, num_columns, teacher_scale, teacher_softcap, HAS_TEACHER_SOFTCAP)
        lane_teacher_highest, lane_teacher_total = _add_tile(value, lane_teacher_highest, lane_teacher_total)
    highest, log_total = _join_lanes(lane_highest, lane_total)
    teacher_highest, log_teacher_total = _join_lanes(lane_teacher_highest, lane_teacher_total)

    # Sums of p (log p - log q) or p (log p - log m), and of q (log q - log p) or q (log q - log m).
    lane_from_teacher = tl.zeros((LANES,), tl.float32)
    lane_from_student = tl.zeros((LANES,), tl.float32)
    for start in range(0, num_columns, DEPTH * LANES):
        cols = start + tile_cols
        raw, value = _load(row_ptr, cols, num_columns, scale, softcap, HAS_SOFTCAP)
        log_q = (value - highest) - log_total
        q = tl.exp(log_q)
        _, value = _load(teacher_row_ptr, cols, num_columns, teacher_scale, teacher_softcap, HAS_TEACHER_SOFTCAP)
        log_p = (value - teacher_highest) - log_teacher_total
        p = tl.exp(log_p)
        if KIND == _FORWARD_KL:
            lane_from_teacher += tl.sum(_share_times(p, log_p - log_q), axis=0)
            if WRITE_GRADIENT:
                _store_gradient(row_ptr, cols, num_columns, q - p, raw, scale, softcap, HAS_SOFTCAP)
        elif KIND == _REVERSE_KL:
            lane_from_student += tl.sum(_share_times(q, log_q - log_p), axis=0)
        else:
            log_m = tl.log(beta * p + (1.0 - beta) * q)
            lane_from_teacher += tl.sum(_share_times(p, log_p - log_m), axis=0)
            lane_from_student += tl.sum(_share_times(q, log_q - log_m), axis=0)
    from_teacher = tl.sum(lane_from_teacher, axis=0)
    from_student = tl.sum(lane_from_student, axis=0)
    divergence = from_teacher + from_student
    if KIND == _JSD:
        divergence = beta * from_teacher + (1.0 - beta) * from_student
    tl.store(divergence_ptr + row, divergence)

    if WRITE_GRADIENT and KIND != _FORWARD_KL:
        for start in range(0, num_columns, DEPTH * LANES):
            cols = start + tile_cols
            raw, value = _load(row_ptr, cols, num_columns, scale, softcap, HAS_SOFTCAP)
            log_q = (value - highest) - log_total
            q = tl.exp(log_q)
            _, value = _load(teacher_row_ptr, cols, num_columns, teacher_scale, teacher_softcap, HAS_TEACHER_SOFTCAP)
            log_to = (value - teacher_highest) - log_teacher_total
            factor = 1.0
            if KIND == _JSD:
                log_to = tl.log(beta * tl.exp(log_to) + (1.0 - beta) * q)
                factor = 1.0 - beta
            gradient = factor * _share_times(q, (log_q - log_to) - from_student)
            _store_gradient(row_ptr, cols, num_columns, gradient, raw, scale, softcap, HAS_SOFTCAP)


@triton.jit
def _rest_kernel(
    logits_ptr,
    highest_ptr,
    known_ptr,
    teacher_rest_ptr,
    rest_ptr,
    row_stride,
    num_columns,
    scale,
    softcap,
    HAS_SOFTCAP: tl.constexpr,
    WRITE_GRADIENT: tl.constexpr,
    DEPTH: tl.constexpr,
    LANES: tl.constexpr,
):
    """Run one program per row; known tokens have a raw logit of -inf, which a soft cap would make finite."""
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * row_stride
    tile_cols = tl.arange(0, DEPTH)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    lane_highest = tl.full((LANES,), _LOWEST, tl.float32)
    lane_total = tl.zeros((LANES,), tl.float32)
    for start in range(0, num_columns, DEPTH * LANES):
        raw, value = _load(row_ptr, start + tile_cols, num_columns, scale, softcap, HAS_SOFTCAP)
        value = tl.where(raw == -float("inf"), -float("inf"), value)
        lane_highest, lane_total = _add_tile(value, lane_highest, lane_total)
    highest, log_total = _join_lanes(lane_highest, lane_total)
    # Subtract logits first: highest + log_total would round at the magnitude of the logits.
    rest = (highest - tl.load(highest_ptr + row)) + log_total
    tl.store(rest_ptr + row, rest)

    if WRITE_GRADIENT:
        student_rest = 1.0 / (1.0 + tl.exp(tl.load(known_ptr + row) - rest))
        difference = student_rest - tl.load(teacher_rest_ptr + row)
        for start in range(0, num_columns, DEPTH * LANES):
            cols = start + tile_cols
            raw, value = _load(row_ptr, cols, num_columns, scale, softcap, HAS_SOFTCAP)
            value = tl.where(raw == -float("inf"), -float("inf"), value)
            gradient = tl.exp((value - highest) - log_total) * difference
            _store_gradient(row_ptr, cols, num_columns, gradient, raw, scale, softcap, HAS_SOFTCAP)


def row_divergences(
    logits_RV: torch.Tensor, teacher_RV: torch.Tensor, *, form: DivergenceForm, writes_gradient: bool
) -> torch.Tensor:
    """Return each row's divergence; if asked, overwrite the student's raw logits with its gradient; same contract as
    the reference.
    """
    num_rows, num_columns = logits_RV.shape
    divergence_R = torch.empty(num_rows, dtype=torch.float32, device=logits_RV.device)
    if num_rows == 0:
        return divergence_R
    lanes, depth = _tile(num_columns)
    launch(
        _divergence_kernel,
        (num_rows,),
        logits_RV,
        teacher_RV,
        divergence_R,
        logits_RV.stride(0),
        teacher_RV.stride(0),
        num_columns,
        float(form.beta),
        float(form.scale),
        1.0 if form.softcap is None else float(form.softcap),
        float(form.teacher_scale),
        1.0 if form.teacher_softcap is None else float(form.teacher_softcap),
        KIND=KINDS.index(form.kind),
        HAS_SOFTCAP=form.softcap is not None,
        HAS_TEACHER_SOFTCAP=form.teacher_softcap is not None,
        WRITE_GRADIENT=writes_gradient,
        DEPTH=depth,
        LANES=lanes,
        num_warps=NUM_WARPS,
    )
    return divergence_R


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
    """Return the logarithm of each row's sum of exp(logit - highest) over unknown tokens; same contract as the
    reference.
    """
    num_rows, num_columns = logits_RV.shape
    rest_R = torch.empty(num_rows, dtype=torch.float32, device=logits_RV.device)
    if num_rows == 0:
        return rest_R
    lanes, depth = _tile(num_columns)
    launch(
        _rest_kernel,
        (num_rows,),
        logits_RV,
        highest_R,
        known_R,
        teacher_rest_R,
        rest_R,
        logits_RV.stride(0),
        num_columns,
        float(scale),
        1.0 if softcap is None else float(softcap),
        HAS_SOFTCAP=softcap is not None,
        WRITE_GRADIENT=writes_gradient,
        DEPTH=depth,
        LANES=lanes,
        num_warps=NUM_WARPS,
    )
    return rest_R


def _tile(num_columns: int) -> tuple[int, int]:
    """Return lanes and depth of a tile."""
    lanes = min(next_power_of_2(num_columns), MAX_LANES)
    return lanes, min(next_power_of_2(ceil_div(num_columns, lanes)), MAX_DEPTH)
