"""AdamW for many tensors in one launch: the kernels find each tensor through a table of addresses on the device.

Axes: R rows of the table, one per tensor; A kinds of address; C chunks of all tensors, at most ``CHUNK`` elements each.
Per element a step reads gradient, master and both moments and writes master, both moments and copy: 28 bytes in fp32, 2
more with a copy, 12 less with 8-bit moments. A row without gradient has address 0, and its chunks read and write no
element.
"""

# Parameters of a jit body have no Python types.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lightning_fastft.kernels.adamw_step import codes
from lightning_fastft.kernels.adamw_step.reference import (
    SkipFlag,
    StepOptions,
    bias_corrections,
    bias_corrections_on_device,
)
from lightning_fastft.kernels.adamw_step.rounding import NUM_HALVES
from lightning_fastft.kernels.adamw_step.table import ALIGNMENT, CHUNK, TensorTable
from lightning_fastft.kernels.launch import launch

NUM_WARPS = 8
# 1024 programs of 8 warps fill 128 multiprocessors; a fixed number, so that sums have the same order on every device.
# Not yet measured; candidates: python -m benchmarks.row_kernels --only adamw_step --tiles.
NUM_PARTIALS = 1024
# Blocks per program for 8-bit moments. 100 M bf16 values took 550 us on an H200; six other candidates took 508 (chunks
# of 8192, 2 blocks on 1 warp) to 696: python -m benchmarks.row_kernels --only "averages in 8 bits" --rows 16384 --width
# 6144 --tiles.
NUM_BLOCKS = 4
NUM_WARPS_8BIT = 4

# Rows of the table of addresses.
_PARAM = tl.constexpr(0)
_EXP_AVG = tl.constexpr(1)
_EXP_AVG_SQ = tl.constexpr(2)
_COPY = tl.constexpr(3)
_SIZE = tl.constexpr(4)
_EXP_AVG_ABSMAX = tl.constexpr(5)
_EXP_AVG_SQ_ABSMAX = tl.constexpr(6)
_NUMBER = tl.constexpr(7)
_FIRST = tl.constexpr(8)
_NUM_HALVES = tl.constexpr(NUM_HALVES)
_ALIGNMENT = tl.constexpr(ALIGNMENT)
# Above the number of elements of any tensor, and a multiple of every vector width.
_EVERYTHING = tl.constexpr(2**62)
_NUM_CODES = tl.constexpr(codes.NUM_CODES)
_WIDTH = tl.constexpr(codes.BLOCK)
_ZERO = tl.constexpr(codes.zero_code(is_signed=True))
# Starts of the zones of each map.
_S1, _S2, _S3, _S4, _S5, _S6, _S7, _S8 = map(tl.constexpr, codes.thresholds(is_signed=True))
_U1, _U2, _U3, _U4, _U5, _U6, _U7, _U8 = map(tl.constexpr, codes.thresholds(is_signed=False))
# Length of a row of the table of codes.
_TABLE_WIDTH = tl.constexpr(codes.NUM_CODES + codes.NUM_SLOPES)
_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _load_pointer(ptr, DTYPE: tl.constexpr, IS_ALIGNED: tl.constexpr):
    """Return an address as a pointer; an alignment hint from the host lets the compiler use vector access."""
    pointer = tl.load(ptr).to(tl.pointer_type(DTYPE))
    if IS_ALIGNED:
        pointer = tl.multiple_of(pointer, _ALIGNMENT)
    return pointer


@triton.jit
def _find_chunk(
    address_ptr, grad_address_ptr, row_ptr, index_ptr, num_rows, chunk, IS_ALIGNED: tl.constexpr, BLOCK: tl.constexpr
):
    """Return the row of a chunk, its elements, and their mask."""
    row = tl.load(row_ptr + chunk).to(tl.int64)
    offs = tl.load(index_ptr + chunk).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    num_readable = tl.where(tl.load(grad_address_ptr + row) != 0, tl.load(address_ptr + _SIZE * num_rows + row), 0)
    if IS_ALIGNED:
        num_readable = tl.multiple_of(num_readable, _ALIGNMENT)
    return row, offs, offs < num_readable


@triton.jit
def _random_halves(place_ptr, num_rows, seed, step, start, NUM: tl.constexpr):
    """Return NUM random numbers of 16 bits for the elements of a row from start on, as ``rounding.random_halves``."""
    first = tl.load(place_ptr + _FIRST * num_rows) + start
    group = (first // _NUM_HALVES + tl.arange(0, NUM // _NUM_HALVES)).to(tl.uint32)
    zero = tl.zeros_like(group)
    number = zero + tl.load(place_ptr + _NUMBER * num_rows).to(tl.uint32)
    one, two, three, four = tl.philox(seed, group, zero + step.to(tl.uint32), number, zero)
    words = tl.join(tl.join(one, three), tl.join(two, four))
    return tl.reshape(tl.join(words & 0xFFFF, words >> 16), (NUM,))


@triton.jit
def _round_stochastically(values, noise):
    """Round fp32 values stochastically to bf16; the lower 16 bits are the probability of rounding away from zero."""
    rounded = ((values.to(tl.uint32, bitcast=True) + noise) & 0xFFFF0000).to(tl.float32, bitcast=True)
    # False for NaN and infinity, which are kept.
    return tl.where(values * 0.0 == 0.0, rounded, values).to(tl.bfloat16)


@triton.jit(do_not_specialize=["seed", "step"])
def _adamw_kernel(
    address_ptr,
    grad_address_ptr,
    row_ptr,
    index_ptr,
    rate_ptr,
    scale_ptr,
    found_inf_ptr,
    number_ptr,
    num_rows,
    seed,
    step,
    rate,
    decay,
    beta1,
    grad_share,
    beta2,
    square_share,
    root_correction,
    eps,
    PARAM_DTYPE: tl.constexpr,
    GRAD_DTYPE: tl.constexpr,
    COPY_DTYPE: tl.constexpr,
    HAS_RATE: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_SKIP: tl.constexpr,
    IS_STOCHASTIC: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Run one program per chunk. If the learning rate is on the device, rate and decay are passed for a rate of 1.

    With a flag, rate and root_correction come from the device, and a skipped step reads and writes no element.
    """
    row, offs, inside = _find_chunk(
        address_ptr, grad_address_ptr, row_ptr, index_ptr, num_rows, tl.program_id(0), IS_ALIGNED, BLOCK
    )
    if HAS_SKIP:
        # Compare with a number of elements, so that the compiler still knows which vectors are inside.
        inside = inside & (offs < tl.where(tl.load(found_inf_ptr) == 0.0, _EVERYTHING, 0))
        rate = tl.load(number_ptr)
        root_correction = tl.load(number_ptr + 1)
        step -= tl.load(number_ptr + 2).to(tl.int32)
    place_ptr = address_ptr + row
    param_ptrs = _load_pointer(place_ptr + _PARAM * num_rows, PARAM_DTYPE, IS_ALIGNED) + offs
    avg_ptrs = _load_pointer(place_ptr + _EXP_AVG * num_rows, tl.float32, IS_ALIGNED) + offs
    square_ptrs = _load_pointer(place_ptr + _EXP_AVG_SQ * num_rows, tl.float32, IS_ALIGNED) + offs
    grad = tl.load(_load_pointer(grad_address_ptr + row, GRAD_DTYPE, IS_ALIGNED) + offs, mask=inside, other=0.0).to(
        tl.float32
    )
    param = tl.load(param_ptrs, mask=inside, other=0.0).to(tl.float32)
    avg = tl.load(avg_ptrs, mask=inside, other=0.0)
    square = tl.load(square_ptrs, mask=inside, other=0.0)
    if HAS_SCALE:
        grad *= tl.load(scale_ptr)
    if HAS_RATE:
        learning_rate = tl.load(rate_ptr)
        rate *= learning_rate
        decay *= learning_rate

    # Like torch.lerp: interpolate from the nearer end, so that a share of 1 gives the gradient itself.
    avg = tl.where(grad_share < 0.5, avg + grad_share * (grad - avg), grad - beta1 * (grad - avg))
    square = beta2 * square + square_share * grad * grad
    denominator = tl.div_rn(tl.sqrt_rn(square), root_correction) + eps
    # Sum both changes before the update of the master: one rounding at its magnitude instead of two.
    param -= decay * param + rate * tl.div_rn(avg, denominator)

    if IS_STOCHASTIC:
        first = tl.load(index_ptr + tl.program_id(0)).to(tl.int64) * BLOCK
        rounded = _round_stochastically(param, _random_halves(place_ptr, num_rows, seed, step, first, BLOCK))
    else:
        rounded = param.to(PARAM_DTYPE)
    tl.store(param_ptrs, rounded, mask=inside)
    tl.store(avg_ptrs, avg, mask=inside)
    tl.store(square_ptrs, square, mask=inside)
    if COPY_DTYPE is not None:
        copy_ptrs = _load_pointer(place_ptr + _COPY * num_rows, COPY_DTYPE, IS_ALIGNED) + offs
        tl.store(copy_ptrs, rounded.to(tl.float32).to(COPY_DTYPE), mask=inside)


@triton.jit
def _find_zone(size, T1, T2, T3, T4, T5, T6, T7, T8):
    """Return the number of eight ascending thresholds that a magnitude reaches."""
    is_upper = size >= T5
    is_high = size >= tl.where(is_upper, T7, T3)
    is_last = size >= tl.where(is_upper, tl.where(is_high, T8, T6), tl.where(is_high, T4, T2))
    # A magnitude that reaches another threshold also reaches the lowest.
    return tl.where(is_upper, 4, 0) + tl.where(is_high, 2, 0) + is_last.to(tl.int32) + (size >= T1).to(tl.int32)


@triton.jit
def _find_place(size, zone, slope_ptr, NUM_FIRST: tl.constexpr):
    """Return the index of the nearest value of a zone; a zone has the indices from NUM_FIRST * 2^(zone - 1) to twice
    that.
    """
    end = NUM_FIRST << zone
    # The cells of a zone span 0.1 to 1 of its decade: an index is the slope times the magnitude, plus 8/9 of the
    # zone's first index.
    place = (size * tl.load(slope_ptr + zone) + end.to(tl.float32) * (4.0 / 9.0)).to(tl.int32)
    return tl.minimum(place, end - 1)


@triton.jit
def _encode_signed(values, table_ptr):
    """Return the nearest codes of values in [-1, 1]."""
    size = tl.abs(values)
    zone = _find_zone(size, _S1, _S2, _S3, _S4, _S5, _S6, _S7, _S8)
    place = _find_place(size, zone, table_ptr + _NUM_CODES, 1)
    # The map has no -1.
    return tl.where(values < 0.0, _ZERO - tl.minimum(place, _ZERO), _ZERO + place).to(tl.uint8)


@triton.jit
def _encode_unsigned(values, table_ptr):
    """Return the nearest codes of values in [0, 1]."""
    zone = _find_zone(values, _U1, _U2, _U3, _U4, _U5, _U6, _U7, _U8)
    place = _find_place(values, zone, table_ptr + _TABLE_WIDTH + _NUM_CODES, 2)
    # Indices start at 1.
    return (tl.maximum(place, 1) - 1).to(tl.uint8)


@triton.jit
def _inverse(absmax):
    """Return the factor that scales a block to a largest magnitude of 1; 0 for a block of zeros."""
    return tl.where(absmax > 0.0, 1.0 / absmax, 0.0)[:, None]


@triton.jit(do_not_specialize=["seed", "step"])
def _adamw_8bit_kernel(
    address_ptr,
    grad_address_ptr,
    row_ptr,
    index_ptr,
    rate_ptr,
    scale_ptr,
    found_inf_ptr,
    number_ptr,
    table_ptr,
    num_rows,
    seed,
    step,
    rate,
    decay,
    beta1,
    grad_share,
    beta2,
    square_share,
    root_correction,
    eps,
    PARAM_DTYPE: tl.constexpr,
    GRAD_DTYPE: tl.constexpr,
    COPY_DTYPE: tl.constexpr,
    HAS_RATE: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_SKIP: tl.constexpr,
    IS_STOCHASTIC: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
):
    """Run one program per chunk and NUM_BLOCKS blocks of it. If the learning rate is on the device, rate and decay are
    passed for a rate of 1.

    With a flag, rate and root_correction come from the device, and a skipped step reads and writes no element. Roots
    and quotients use fast approximations, whose error is far below the rounding to 8 bits.
    """
    row = tl.load(row_ptr + tl.program_id(0)).to(tl.int64)
    start = tl.load(index_ptr + tl.program_id(0)).to(tl.int64) * CHUNK + tl.program_id(1) * (NUM_BLOCKS * _WIDTH)
    size = tl.load(address_ptr + _SIZE * num_rows + row)
    num_readable = tl.where(tl.load(grad_address_ptr + row) != 0, size, 0)
    if HAS_SKIP:
        num_readable = tl.where(tl.load(found_inf_ptr) == 0.0, num_readable, 0)
        rate = tl.load(number_ptr)
        root_correction = tl.load(number_ptr + 1)
        step -= tl.load(number_ptr + 2).to(tl.int32)
    if IS_ALIGNED:
        num_readable = tl.multiple_of(num_readable, _ALIGNMENT)
    blocks = tl.arange(0, NUM_BLOCKS)
    offs = blocks[:, None] * _WIDTH + tl.arange(0, _WIDTH)[None, :]
    num_left = tl.maximum(tl.minimum(num_readable - start, NUM_BLOCKS * _WIDTH), 0).to(tl.int32)
    if IS_ALIGNED:
        num_left = tl.multiple_of(num_left, _ALIGNMENT)
    inside = offs < num_left
    is_block = blocks * _WIDTH < num_left

    place_ptr = address_ptr + row
    param_ptrs = _load_pointer(place_ptr + _PARAM * num_rows, PARAM_DTYPE, IS_ALIGNED) + start + offs
    avg_ptrs = _load_pointer(place_ptr + _EXP_AVG * num_rows, tl.uint8, IS_ALIGNED) + start + offs
    square_ptrs = _load_pointer(place_ptr + _EXP_AVG_SQ * num_rows, tl.uint8, IS_ALIGNED) + start + offs
    avg_absmax_ptrs = (
        tl.load(place_ptr + _EXP_AVG_ABSMAX * num_rows).to(tl.pointer_type(tl.float32)) + start // _WIDTH + blocks
    )
    square_absmax_ptrs = (
        tl.load(place_ptr + _EXP_AVG_SQ_ABSMAX * num_rows).to(tl.pointer_type(tl.float32)) + start // _WIDTH + blocks
    )
    grad_ptrs = _load_pointer(grad_address_ptr + row, GRAD_DTYPE, IS_ALIGNED) + start + offs
    grad = tl.load(grad_ptrs, mask=inside, other=0.0).to(tl.float32)
    param = tl.load(param_ptrs, mask=inside, other=0.0).to(tl.float32)
    avg = tl.load(table_ptr + tl.load(avg_ptrs, mask=inside, other=_ZERO).to(tl.int32))
    square = tl.load(table_ptr + _TABLE_WIDTH + tl.load(square_ptrs, mask=inside, other=0).to(tl.int32))
    avg *= tl.load(avg_absmax_ptrs, mask=is_block, other=0.0)[:, None]
    square *= tl.load(square_absmax_ptrs, mask=is_block, other=0.0)[:, None]
    if HAS_SCALE:
        grad *= tl.load(scale_ptr)
    if HAS_RATE:
        learning_rate = tl.load(rate_ptr)
        rate *= learning_rate
        decay *= learning_rate

    avg = beta1 * avg + grad_share * grad
    square = beta2 * square + square_share * grad * grad
    param -= decay * param + rate * (avg / (tl.sqrt(square) * (1.0 / root_correction) + eps))
    # Beyond the end, gradient and moments are 0, and so is the update.
    avg_absmax = tl.max(tl.abs(avg), axis=1)
    square_absmax = tl.max(square, axis=1)

    if IS_STOCHASTIC:
        noise = _random_halves(place_ptr, num_rows, seed, step, start, NUM_BLOCKS * _WIDTH)
        rounded = _round_stochastically(param, tl.reshape(noise, (NUM_BLOCKS, _WIDTH)))
    else:
        rounded = param.to(PARAM_DTYPE)
    tl.store(param_ptrs, rounded, mask=inside)
    tl.store(avg_ptrs, _encode_signed(avg * _inverse(avg_absmax), table_ptr), mask=inside)
    tl.store(square_ptrs, _encode_unsigned(square * _inverse(square_absmax), table_ptr), mask=inside)
    tl.store(avg_absmax_ptrs, avg_absmax, mask=is_block)
    tl.store(square_absmax_ptrs, square_absmax, mask=is_block)
    if COPY_DTYPE is not None:
        copy_ptrs = _load_pointer(place_ptr + _COPY * num_rows, COPY_DTYPE, IS_ALIGNED) + start + offs
        tl.store(copy_ptrs, rounded.to(tl.float32).to(COPY_DTYPE), mask=inside)


@triton.jit
def _sum_squares_kernel(
    address_ptr,
    grad_address_ptr,
    row_ptr,
    index_ptr,
    partial_ptr,
    num_rows,
    num_chunks,
    GRAD_DTYPE: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Run one program per partial sum, over every NUM_PROGRAMS-th chunk: fp32 inside a chunk, float64 across chunks."""
    program = tl.program_id(0)
    total = tl.zeros((), dtype=tl.float64)
    for chunk in range(program, num_chunks, NUM_PROGRAMS):
        row, offs, inside = _find_chunk(
            address_ptr, grad_address_ptr, row_ptr, index_ptr, num_rows, chunk, IS_ALIGNED, BLOCK
        )
        grad = tl.load(_load_pointer(grad_address_ptr + row, GRAD_DTYPE, IS_ALIGNED) + offs, mask=inside, other=0.0).to(
            tl.float32
        )
        total += tl.sum(grad * grad, axis=0).to(tl.float64)
    tl.store(partial_ptr + program, total)


@triton.jit
def _norm_kernel(partial_ptr, norm_ptr, num_partials, BLOCK: tl.constexpr):
    """Run one program; write the root of the sum of all partial sums."""
    total = tl.zeros((), dtype=tl.float64)
    for start in range(0, num_partials, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        total += tl.sum(tl.load(partial_ptr + offs, mask=offs < num_partials, other=0.0), axis=0)
    tl.store(norm_ptr, tl.sqrt(total).to(tl.float32))


def adamw_step(
    table: TensorTable, *, options: StepOptions, scale: torch.Tensor | None = None, skip: SkipFlag | None = None
) -> None:
    """Update masters, moments and copies; same contract as the reference, and one rounding less in the master."""
    table.refresh()
    correction, root_correction = bias_corrections(options)
    rate_tensor = options.learning_rate if isinstance(options.learning_rate, torch.Tensor) else None
    learning_rate = 1.0 if isinstance(options.learning_rate, torch.Tensor) else options.learning_rate
    numbers_3 = None if skip is None else _numbers_on_device(options, skip, learning_rate=learning_rate)
    for group, is_aligned in zip(table.groups, table.aligned):
        num_chunks = len(group.stepped[0])
        if num_chunks == 0:
            continue
        given = (
            table.address_AR,
            table.grad_address_R,
            *group.stepped,
            table.address_AR if rate_tensor is None else rate_tensor,
            table.address_AR if scale is None else scale,
            table.address_AR if skip is None else skip.found_inf,
            table.address_AR if numbers_3 is None else numbers_3,
        )
        numbers = (
            len(table.rows),
            options.rounding_seed or 0,
            options.step,
            float(learning_rate / correction),
            float(learning_rate * options.weight_decay),
            float(options.beta1),
            1.0 - options.beta1,
            float(options.beta2),
            1.0 - options.beta2,
            root_correction,
            float(options.eps),
        )
        constants = {
            "PARAM_DTYPE": _DTYPES[group.param_dtype],
            "GRAD_DTYPE": _DTYPES[group.grad_dtype],
            "COPY_DTYPE": None if group.copy_dtype is None else _DTYPES[group.copy_dtype],
            "HAS_RATE": rate_tensor is not None,
            "HAS_SCALE": scale is not None,
            "HAS_SKIP": skip is not None,
            "IS_STOCHASTIC": options.rounding_seed is not None and group.param_dtype is torch.bfloat16,
            "IS_ALIGNED": is_aligned,
        }
        if group.average_dtype is torch.uint8:
            grid = (num_chunks, CHUNK // (NUM_BLOCKS * codes.BLOCK))
            launch(
                _adamw_8bit_kernel,
                grid,
                *given,
                table.code_table,
                *numbers,
                **constants,
                CHUNK=CHUNK,
                NUM_BLOCKS=NUM_BLOCKS,
                num_warps=NUM_WARPS_8BIT,
            )
        else:
            launch(_adamw_kernel, (num_chunks,), *given, *numbers, **constants, BLOCK=CHUNK, num_warps=NUM_WARPS)
    # Autograd does not see writes of a kernel. A backward that saved the old values must raise.
    torch.autograd.graph.increment_version(
        [tensor for row, tensors in zip(table.rows, table.written) if row.owner.grad is not None for tensor in tensors]
    )


def _numbers_on_device(options: StepOptions, skip: SkipFlag, *, learning_rate: float) -> torch.Tensor:
    """Return rate and root_correction of the kernel, computed in float64 on the device, and the number of skipped
    steps; shape (3,), fp32.

    Without a flag the host computes them the same way.
    """
    correction, root_correction = bias_corrections_on_device(options, skip.num_skipped)
    return torch.stack([learning_rate / correction, root_correction, skip.num_skipped]).float()


def grad_norm(table: TensorTable) -> torch.Tensor:
    """Return the L2 norm of all gradients together; same contract as the reference."""
    table.refresh(only_gradients=True)
    num_programs = [min(len(group.row_C), NUM_PARTIALS) for group in table.groups]
    if not any(num_programs):
        return torch.zeros((), dtype=torch.float32, device=table.device)
    partials = torch.empty(sum(num_programs), dtype=torch.float64, device=table.device)
    norm = torch.empty((), dtype=torch.float32, device=table.device)
    for group, is_aligned, num, partial in zip(table.groups, table.aligned, num_programs, partials.split(num_programs)):
        if num == 0:
            continue
        launch(
            _sum_squares_kernel,
            (num,),
            table.address_AR,
            table.grad_address_R,
            group.row_C,
            group.index_C,
            partial,
            len(table.rows),
            len(group.row_C),
            GRAD_DTYPE=_DTYPES[group.grad_dtype],
            IS_ALIGNED=is_aligned,
            NUM_PROGRAMS=NUM_PARTIALS,
            BLOCK=CHUNK,
            num_warps=NUM_WARPS,
        )
    launch(_norm_kernel, (1,), partials, norm, len(partials), BLOCK=NUM_PARTIALS, num_warps=NUM_WARPS)
    return norm
