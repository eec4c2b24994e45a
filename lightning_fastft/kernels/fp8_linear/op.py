"""Products of linear layers in fp8 (e4m3 x e4m3), with a scale per row of activations and per output column.

Forward, ``y = x @ W^T``: the sum runs over input columns, so the scales of rows and of output columns are factors of
the whole sum. Backward, ``d_x = d_y @ W``: the sum runs over output columns, so their scales are multiplied into d_y
before its rows are quantised. Both passes read the same fp8 weight, so the backward is the gradient of the forward that
ran.

Gradient of the weight, ``d_W = d_y^T @ x``: the sum runs over rows, so the scales of rows cannot be factors of the sum.
Both are powers of 2 here, so the e4m3 numbers of the other two products serve a third time: they are transposed, and
each row is shifted by its exponent. A shift rounds nothing, unless a row contributes so little that its numbers fall
below the range of e4m3. Each operand takes half of the exponent of both scales; the largest exponent is a factor of the
whole sum.

Scales of weights are powers of 2. bf16 holds them exactly, which halves the bytes read per number of d_y. They cost a
number no digit, only up to one of the 18 bits that the range of e4m3 spans. Gradients are e4m3 too: each row has its
own scale and uses the whole range (its largest number is 448, and numbers 29,000 times smaller are still normal), and
e5m2 has half the digits. On Gaussian rows the relative error of a product with e4m3 weights is 3.7 % with e4m3
gradients and 5.7 % with e5m2 gradients, 2.6 % of it from the weights (tests/kernels/test_fp8_linear.py).

Axes: T rows, I columns that a product sums over; O output columns and I input columns of a weight. Nothing here builds
a graph.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from lightning_fastft.core.checks import check_bool, check_choice, check_layout, check_rows_apart
from lightning_fastft.core.errors import OptionError, ShapeError
from lightning_fastft.kernels.backends import TRITON_DTYPES, choose_module, must_check
from lightning_fastft.kernels.fp8_linear import reference
from lightning_fastft.kernels.fp8_linear.reference import FP8, Fp8Rows
from lightning_fastft.kernels.nf4_experts.reference import BLOCK_WEIGHTS
from lightning_fastft.kernels.nf4_linear.op import _check_parts, _check_weight
from lightning_fastft.kernels.nf4_linear.reference import NF4Weight

# torch's scaled GEMM needs operands whose rows and columns are multiples of 16.
ALIGNED_COLUMNS = 16
# Ada, Hopper and Blackwell.
LEAST_CAPABILITY = (8, 9)


@functools.cache
def find_obstacle(device: torch.device) -> str:
    """Return why a device does not support fp8 products; an empty string if it does.

    Cost:
        Reads the device properties; no host sync.

    Source:
        torch's ``_scaled_mm``: compute capability 8.9 or higher.

    Example:
        >>> find_obstacle(torch.device("cpu"))
        'fp8 products need a CUDA device of compute capability 8.9 or higher, and the weights are on cpu'
    """
    least = ".".join(map(str, LEAST_CAPABILITY))
    needs = f"fp8 products need a CUDA device of compute capability {least} or higher, and"
    if device.type != "cuda":
        return f"{needs} the weights are on {device}"
    capability = torch.cuda.get_device_capability(device)
    if capability >= LEAST_CAPABILITY:
        return ""
    return f"{needs} {torch.cuda.get_device_name(device)} has {capability[0]}.{capability[1]}"


def quantise_rows(
    x_TI: torch.Tensor,
    *,
    factor_I: torch.Tensor | None = None,
    round_scales_to_power_of_2: bool = False,
    out: Fp8Rows | None = None,
    backend: str = "auto",
    is_checked: bool = True,
) -> Fp8Rows:
    """Return ``x * factor`` in e4m3, each row scaled so that its largest number becomes about 448.

    The arithmetic is fp32; each number is rounded to e4m3 once. Rows are independent: a row with NaN or infinity gives
    NaN in its own products only.

    Args:
        x_TI: Rows. Shape (T, I), I > 0; bf16, fp16 or fp32; last axis contiguous, any row stride.
        factor_I: Factor on each column. Shape (I,), fp32 or bf16, contiguous; None for 1.
        round_scales_to_power_of_2: Round scales up, so that the largest number of a row lands between 224 and 448.
        out: Memory for the result, contiguous; None for new memory.
        backend: "reference" (plain PyTorch), or "auto": the kernel on CUDA, else the reference.
        is_checked: Validate the arguments. Pass False only for arguments that are known to be valid.

    Returns:
        The rows, and the scale of each: its largest number over 448, at least 2^-100 / 448, or the next power of 2.

    Raises:
        ShapeError: A shape, dtype, device or layout is wrong.
        OptionError: The backend is unknown or does not support these tensors.

    Cost:
        Reads x_TI once and writes one byte per number; one launch, no host sync. The reference makes fp32 copies.

    Source:
        e4m3: arXiv 2209.05433; scales per row: torchao's row-wise recipe.

    Example:
        >>> rows = quantise_rows(torch.tensor([[1.0, -2.0], [0.25, 0.0]]))
        >>> rows.values_TI.float() * rows.scale_T[:, None]
        tensor([[ 1.0000, -2.0000],
                [ 0.2500,  0.0000]])
    """
    if must_check(is_checked):
        num_columns = check_layout("x_TI", x_TI, (None, None), dtypes=TRITON_DTYPES, num_strided=1).shape[1]
        check_bool("round_scales_to_power_of_2", round_scales_to_power_of_2)
        if num_columns == 0:
            raise ShapeError("x_TI has no columns; the scale of a row needs at least one.")
        if factor_I is not None:
            check_layout("factor_I", factor_I, (num_columns,), dtypes=(torch.float32, torch.bfloat16), like=x_TI)
        if out is not None:
            check_layout("out.values_TI", out.values_TI, tuple(x_TI.shape), dtypes=(FP8,), like=x_TI)
            check_layout("out.scale_T", out.scale_T, (len(x_TI),), dtypes=(torch.float32,), like=x_TI)
    with torch.no_grad():
        return choose_module(reference, x_TI, dtypes=None, backend=backend).quantise_rows(
            x_TI, factor_I=factor_I, round_scales_to_power_of_2=round_scales_to_power_of_2, out=out
        )


def transpose(
    values_TI: torch.Tensor, *, out_IT: torch.Tensor, backend: str = "auto", is_checked: bool = True
) -> torch.Tensor:
    """Return out_IT with the transpose of values in e4m3.

    Args:
        values_TI: Shape (T, I), e4m3; last axis contiguous, any row stride.
        out_IT: Shape (I, T), e4m3; last axis contiguous, any row stride.
        backend: As in ``quantise_rows``.
        is_checked: Validate the arguments. Pass False only for arguments that are known to be valid.

    Raises:
        ShapeError: A shape, dtype, device or layout is wrong.
        OptionError: The backend is unknown or does not support these tensors.

    Cost:
        Reads and writes one byte per number; one launch, no host sync.

    Source:
        own.

    Example:
        >>> values = torch.tensor([[1.0, 2.0, 3.0]]).to(torch.float8_e4m3fn)
        >>> transpose(values, out_IT=torch.empty(3, 1, dtype=torch.float8_e4m3fn)).float()
        tensor([[1.],
                [2.],
                [3.]])
    """
    if must_check(is_checked):
        num_rows, num_columns = check_layout("values_TI", values_TI, (None, None), dtypes=(FP8,), num_strided=1).shape
        check_layout("out_IT", out_IT, (num_columns, num_rows), like=values_TI, num_strided=1)
    module = choose_module(reference, values_TI, dtypes=None, backend=backend)
    if values_TI.numel():
        with torch.no_grad():
            module.transpose(values_TI, shift_T=None, out_IT=out_IT)
    return out_IT


def nf4_row_scales(weights: Sequence[NF4Weight], *, scales: Sequence[torch.Tensor], backend: str = "auto") -> None:
    """Write the e4m3 scale of each row of NF4 weights: the smallest power of 2 that keeps every number within 448.

    The largest scale among the blocks of 64 bounds a row, since the NF4 table ends at 1.

    Args:
        weights: From ``read_params4bit``, any number.
        scales: Output tensors for the scales of the rows, one per weight. Shape (O,), fp32, contiguous; O divides the
            number of blocks of the weight.
        backend: As in ``quantise_rows``.

    Raises:
        OptionError: Numbers of weights and scales differ, or the backend is unknown or does not support this device.
        ShapeError: Shapes, dtypes, devices or layouts do not match.

    Cost:
        Reads 1/64 byte per weight; one launch per weight and no host sync. A frozen weight needs it once.

    Source:
        own; NF4: arXiv 2305.14314.

    Example:
        >>> packed, table = torch.full((32,), 0xF0, dtype=torch.uint8), torch.linspace(-1.0, 1.0, 16)
        >>> weight = NF4Weight(packed, torch.tensor([3.0]), None, None, table, None)
        >>> scale = torch.empty(1)
        >>> nf4_row_scales([weight], scales=[scale])
        >>> scale  # 3 / 448 is between 2^-8 and 2^-7.
        tensor([0.0078])
    """
    if len(weights) != len(scales):
        raise OptionError(f"There are {len(weights)} weights and {len(scales)} scales; give one for each weight.")
    for place, (weight, scale_O) in enumerate(zip(weights, scales)):
        check_layout(f"scales[{place}]", scale_O, (None,), dtypes=(torch.float32,), like=scales[0])
        _check_weight(weight)
        num_blocks = len(weight.absmax_Q)
        if num_blocks % len(scale_O) if len(scale_O) else num_blocks:
            raise ShapeError(
                f"scales[{place}] has {len(scale_O)} entries; give one per row of a weight of {num_blocks} blocks."
            )
        # _check_parts compares with an output tensor; one expanded number serves as it.
        _check_parts(weight, scale_O[:1].expand(num_blocks * BLOCK_WEIGHTS))
    if scales:
        with torch.no_grad():
            choose_module(reference, scales[0], dtypes=None, backend=backend).nf4_row_scales(weights, scales)


def quantise_nf4(
    weights: Sequence[NF4Weight],
    *,
    values: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor],
    is_transposed: bool = False,
    backend: str = "auto",
    is_checked: bool = True,
) -> None:
    """Write NF4 weights in e4m3 without a dense copy; each number is rounded to e4m3 once, from fp32.

    Args:
        weights: From ``read_params4bit``, any number, all of I input columns.
        values: One output per weight. Shape (O, I), or (I, O) if transposed; e4m3; last axis contiguous, any row
            stride, so they may be views of one buffer. The memory between rows is not touched.
        scales: Scales of the rows, from ``nf4_row_scales``, one tensor per weight. Shape (O,), fp32, contiguous. They
            must be powers of 2, or backends round differently.
        is_transposed: Write (I, O), as a product over output columns reads it.
        backend: As in ``quantise_rows``.
        is_checked: Validate the arguments. Pass False only for arguments that are known to be valid.

    Raises:
        OptionError: I is not a multiple of 64, numbers of weights and outputs differ, or the backend is unknown or
            does not support this device.
        ShapeError: Shapes, dtypes, devices or layouts do not match.

    Cost:
        Reads 0.52 bytes and writes 1 byte per weight, in one launch per four weights; no temporary memory and no host
        sync. The reference makes copies of about 20 bytes per weight.

    Source:
        own; NF4: arXiv 2305.14314.

    Example:
        >>> packed, table = torch.full((32,), 0xF0, dtype=torch.uint8), torch.linspace(-1.0, 1.0, 16)
        >>> weight = NF4Weight(packed, torch.tensor([3.0]), None, None, table, None)
        >>> values, scale = torch.empty(1, 64, dtype=torch.float8_e4m3fn), torch.empty(1)
        >>> nf4_row_scales([weight], scales=[scale])
        >>> quantise_nf4([weight], values=[values], scales=[scale])
        >>> (values.float() * scale)[0, :3]
        tensor([ 3., -3.,  3.])
    """
    if must_check(is_checked):
        check_bool("is_transposed", is_transposed)
        if not len(weights) == len(values) == len(scales):
            raise OptionError(
                f"There are {len(weights)} weights, {len(values)} values and {len(scales)} scales; give one value "
                "and one scale for each weight."
            )
        axis = 0 if is_transposed else 1
        for place, (weight, value, scale_O) in enumerate(zip(weights, values, scales)):
            check_layout(f"values[{place}]", value, (None, None), dtypes=(FP8,), like=values[0], num_strided=1)
            check_rows_apart(f"values[{place}]", value)
            num_inputs, num_outputs = value.shape[axis], value.shape[1 - axis]
            check_layout(f"scales[{place}]", scale_O, (num_outputs,), dtypes=(torch.float32,), like=value)
            if num_inputs % BLOCK_WEIGHTS or num_inputs != values[0].shape[axis]:
                raise OptionError(
                    f"values[{place}] has {num_inputs} input columns, values[0] {values[0].shape[axis]}; give all "
                    f"the same multiple of {BLOCK_WEIGHTS}."
                )
            _check_weight(weight)
            _check_parts(weight, value)
    if values:
        with torch.no_grad():
            choose_module(reference, values[0], dtypes=None, backend=backend).quantise_nf4(
                weights, values, scales, is_transposed=is_transposed
            )


def multiply(
    rows: Fp8Rows,
    weight_OI: torch.Tensor,
    scale_O: torch.Tensor | None,
    *,
    dtype: torch.dtype,
    backend: str = "auto",
    is_checked: bool = True,
) -> torch.Tensor:
    """Return ``rows @ weight^T`` with all scales applied.

    Args:
        rows: From ``quantise_rows``.
        weight_OI: Shape (O, I), e4m3, contiguous; O and I multiples of 16 on CUDA.
        scale_O: Scales of the rows of the weight. Shape (O,), fp32, contiguous; None for 1.
        dtype: Dtype of the result: bf16; with "reference" also fp16 and fp32.
        backend: "auto" (torch's scaled GEMM on CUDA) or "reference".
        is_checked: Validate the arguments. Pass False only for arguments that are known to be valid.

    Returns:
        Shape (T, O), contiguous.

    Raises:
        ShapeError: Shapes, dtypes, devices or layouts do not match.
        OptionError: The backend is unknown, or does not support these sizes, this dtype or this device.

    Cost:
        2 T I O FLOP in fp8; no host sync. The reference multiplies fp32 copies of both.

    Source:
        ``torch._scaled_mm`` with scales per row.

    Example:
        >>> rows, weight = quantise_rows(torch.eye(2)), quantise_rows(torch.tensor([[1.0, 2.0], [4.0, 2.0]]))
        >>> multiply(rows, weight.values_TI, weight.scale_T, dtype=torch.bfloat16)
        tensor([[1., 4.],
                [2., 2.]], dtype=torch.bfloat16)
    """
    if must_check(is_checked):
        check_choice("dtype", dtype, TRITON_DTYPES)
        num_outputs, num_inputs = check_layout("weight_OI", weight_OI, (None, None), dtypes=(FP8,)).shape
        num_rows = len(check_layout("rows.values_TI", rows.values_TI, (None, num_inputs), like=weight_OI))
        check_layout("rows.scale_T", rows.scale_T, (num_rows,), dtypes=(torch.float32,), like=weight_OI)
        if scale_O is not None:
            check_layout("scale_O", scale_O, (num_outputs,), dtypes=(torch.float32,), like=weight_OI)
    module = choose_module(reference, weight_OI, dtypes=None, backend=backend)
    if module is not reference:
        _check_product(*weight_OI.shape, dtype=dtype)
        if rows.values_TI.shape[0] == 0:
            return rows.values_TI.new_empty(0, weight_OI.shape[0], dtype=dtype)
    with torch.no_grad():
        return module.multiply(rows, weight_OI, scale_O, dtype=dtype)


def weight_gradient(
    d: Fp8Rows,
    x: Fp8Rows,
    factor_O: torch.Tensor,
    *,
    dtype: torch.dtype,
    backend: str = "auto",
    is_checked: bool = True,
) -> torch.Tensor:
    """Return ``(d / factor)^T @ x``, the gradient of a weight.

    Args:
        d: Gradient of the output times the factor, from ``quantise_rows`` with scales that are powers of 2. Values
            (T, O), last axis contiguous, any row stride.
        x: Rows that the layer read, likewise. Values (T, I).
        factor_O: Powers of 2 that d was multiplied with before it was quantised. Shape (O,), fp32, contiguous.
        dtype: As in ``multiply``.
        backend: As in ``multiply``.
        is_checked: Validate the arguments. Pass False only for arguments that are known to be valid.

    Returns:
        Shape (O, I), contiguous.

    Raises:
        ShapeError: Shapes, dtypes, devices or layouts do not match.
        OptionError: As in ``multiply``.

    Cost:
        2 T I O FLOP in fp8; reads both operands and writes them transposed, one byte per number each; four launches and
        no host sync.

    Source:
        own; ``torch._scaled_mm`` with scales per row.

    Example:
        >>> x = quantise_rows(torch.tensor([[1.0, 2.0], [4.0, 2.0]]), round_scales_to_power_of_2=True)
        >>> d = quantise_rows(torch.tensor([[0.5, 0.0], [0.0, 8.0]]), round_scales_to_power_of_2=True)
        >>> weight_gradient(d, x, torch.tensor([1.0, 2.0]), dtype=torch.bfloat16)
        tensor([[ 0.5000,  1.0000],
                [16.0000,  8.0000]], dtype=torch.bfloat16)
    """
    if must_check(is_checked):
        check_choice("dtype", dtype, TRITON_DTYPES)
        num_rows, num_outputs = check_layout(
            "d.values_TI", d.values_TI, (None, None), dtypes=(FP8,), num_strided=1
        ).shape
        check_layout("x.values_TI", x.values_TI, (num_rows, None), like=d.values_TI, dtypes=(FP8,), num_strided=1)
        for name, scale_T in (("d", d.scale_T), ("x", x.scale_T)):
            check_layout(f"{name}.scale_T", scale_T, (num_rows,), dtypes=(torch.float32,), like=d.values_TI)
        check_layout("factor_O", factor_O, (num_outputs,), dtypes=(torch.float32,), like=d.values_TI)
    num_outputs, num_inputs = d.values_TI.shape[1], x.values_TI.shape[1]
    module = choose_module(reference, d.values_TI, dtypes=None, backend=backend)
    if module is not reference:
        _check_product(num_outputs, num_inputs, dtype=dtype)
    if len(d.values_TI) == 0:
        return d.values_TI.new_zeros(num_outputs, num_inputs, dtype=dtype)
    with torch.no_grad():
        return module.weight_gradient(d, x, factor_O, dtype=dtype)


def _check_product(num_outputs: int, num_inputs: int, *, dtype: torch.dtype) -> None:
    """Raise an OptionError for a product that torch's scaled GEMM does not compute."""
    if dtype is not torch.bfloat16 or num_outputs % ALIGNED_COLUMNS or num_inputs % ALIGNED_COLUMNS:
        raise OptionError(
            f"torch's scaled GEMM returns bf16 and needs weight sizes that are multiples of {ALIGNED_COLUMNS}, got "
            f"{dtype} for {(num_outputs, num_inputs)}. Use 'reference' for others."
        )
