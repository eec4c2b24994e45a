"""Rows of logits, one chunk at a time, and functions of single rows that are differentiable without full logits.

Axes: T tokens of the pack, D model width, V vocabulary, R labelled rows (padded to a bucket; the first num_rows count).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from lightning_fastft.core.autocast import autocast_off, is_autocast_on
from lightning_fastft.core.checks import check_int, check_tensor
from lightning_fastft.core.errors import OptionError, ShapeError
from lightning_fastft.core.once_differentiable import once_differentiable
from lightning_fastft.kernels.backends import FLOATING, GPU_TYPES, wide_dtype

# Most rows of logits in memory at a time: 2048 x 151,936 bf16 are 0.6 GiB and keep the GEMMs at full rate. Of narrow
# states fewer rows fit in the memory of the weight; 1024 rows of width 1024 take 2 % longer, 512 take 6 % (an H100).
DEFAULT_CHUNK_ROWS = 2048
_LEAST_CHUNK_ROWS = 1024
# The kernels use the hardware's approximate exp, which is not accurate enough for fp32.
KERNEL_DTYPES = (torch.bfloat16, torch.float16)


class Head(NamedTuple):
    """Last hidden states and the output layer that maps them to logits.

    The logits are ``softcap * tanh(scale * (W h + b) / softcap)``, or ``scale * (W h + b)`` without a soft cap.

    Args:
        hidden_TD: Last hidden states. Shape (T, D); bf16, fp16, fp32 or float64.
        weight_VD: Weight of the output layer. Shape (V, D); dtype of hidden_TD.
        bias_V: Bias of the output layer. Shape (V,); None for no bias.
        scale: Factor on the raw logits.
        softcap: Soft cap of the scaled logits; None for no cap.
    """

    hidden_TD: torch.Tensor
    weight_VD: torch.Tensor
    bias_V: torch.Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None

    def with_temperature(self, temperature: float) -> Head:
        """Return a head whose logits are divided by a temperature, after the soft cap.

        Raises:
            OptionError: The temperature is not a finite number above 0.
        """
        if not 0 < temperature < float("inf"):
            raise OptionError(f"temperature must be a finite number above 0, got {temperature}.")
        softcap = None if self.softcap is None else self.softcap / temperature
        return self._replace(scale=self.scale / temperature, softcap=softcap)

    @property
    def inputs(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return the tensors that may require a gradient."""
        return self.hidden_TD, self.weight_VD, self.bias_V

    @property
    def compute_dtype(self) -> torch.dtype:
        """Return the dtype of the GEMMs: autocast's if it is on, else the dtype of the states."""
        device_type = self.hidden_TD.device.type
        if is_autocast_on(device_type):
            return torch.get_autocast_dtype(device_type)
        return self.hidden_TD.dtype

    def cast(self, dtype: torch.dtype) -> Head:
        """Return the head with weight and bias in the dtype of the GEMMs."""
        bias_V = None if self.bias_V is None else self.bias_V.to(dtype)
        return self._replace(weight_VD=self.weight_VD.to(dtype), bias_V=bias_V)


class LabelledRows(NamedTuple):
    """Rows of the hidden states that have a label.

    Args:
        row_R: Rows of hidden_TD, int64, each at most once among the first num_rows; None for rows 0 to num_rows - 1.
        num_padded: Length R of the results.
        num_rows: Number of labelled rows; the rows after them are padding.
        chunk_rows: Most rows of logits in memory at a time.
    """

    row_R: torch.Tensor | None
    num_padded: int
    num_rows: int
    chunk_rows: int = DEFAULT_CHUNK_ROWS

    def select(self, hidden_TD: torch.Tensor, begin: int, end: int) -> torch.Tensor:
        """Return the states of rows begin to end."""
        return hidden_TD[begin:end] if self.row_R is None else hidden_TD.index_select(0, self.row_R[begin:end])


class Chunk(NamedTuple):
    """Rows begin to end: hidden states, raw logits, and the weight in the dtype of both.

    The next chunk reuses the buffer of the logits.
    """

    begin: int
    end: int
    hidden_RD: torch.Tensor
    logits_RV: torch.Tensor
    weight_VD: torch.Tensor


# Arguments: a chunk, and whether to overwrite its raw logits with the gradient of the values. Returns a value per row,
# and a metric per row without gradient.
RowFunction = Callable[[Chunk, bool], tuple[torch.Tensor, torch.Tensor | None]]


def chunk_rows_of(width: int, *, most: int = DEFAULT_CHUNK_ROWS) -> int:
    """Return the rows of logits in memory at a time, for states of a width."""
    # No more logits than weights, so that the head does not set the peak memory of a small model.
    return min(most, max(_LEAST_CHUNK_ROWS, width))


def logit_chunks(head: Head, rows: LabelledRows, *, dtype: torch.dtype) -> Iterator[Chunk]:
    """Yield the raw logits of the rows, chunk by chunk, in one reused buffer."""
    if rows.num_rows == 0:
        return
    head = head.cast(dtype)
    vocab_size, width = head.weight_VD.shape
    chunk_rows = chunk_rows_of(width, most=rows.chunk_rows)
    buffer_RV = torch.empty(min(chunk_rows, rows.num_padded), vocab_size, dtype=dtype, device=head.hidden_TD.device)
    for begin in range(0, rows.num_rows, chunk_rows):
        end = min(begin + chunk_rows, rows.num_rows)
        hidden_RD = rows.select(head.hidden_TD, begin, end).to(dtype)
        logits_RV = write_raw_logits(hidden_RD, head, out=buffer_RV[: end - begin])
        yield Chunk(begin, end, hidden_RD, logits_RV, head.weight_VD)


def write_raw_logits(hidden_RD: torch.Tensor, head: Head, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return the logits of hidden states, before scale and soft cap."""
    with autocast_off(hidden_RD.device.type):
        if head.bias_V is None:
            return torch.mm(hidden_RD, head.weight_VD.T, out=out)
        return torch.addmm(head.bias_V, hidden_RD, head.weight_VD.T, out=out)


def evaluate_rows(
    head: Head, rows: LabelledRows, function: RowFunction, *, has_metric: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the values and metrics of a function of rows of logits; the values are differentiable in the head.

    The forward computes the gradient of each value with respect to its row's states; the backward multiplies it by the
    incoming gradient. The gradients of weight and bias are sums over rows, so the backward recomputes the logits for
    them.

    Returns:
        value_R: Shape (R,), fp32 (float64 for float64 states); 0 from num_rows on.
        metric_R: The same for the metrics; None without.

    Cost:
        2 V D FLOP per row each for the logits and the gradient of the states. A trained weight or bias runs the
        function again and costs another 2 V D for the sum. Memory: chunk_rows x V logits; with a gradient, R x D states
        for the backward, and V x D in fp32 if the weight is trained. No host sync.
    """
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in head.inputs):
        return _EvaluateRows.apply(*head.inputs, rows, function, has_metric)
    with torch.no_grad():
        return _evaluate(head, rows, function, has_metric=has_metric, d_row_RD=None)


class _EvaluateRows(torch.autograd.Function):
    """Save the gradient of each row's value with respect to its states.

    For a trained weight or bias it saves the inputs too: their gradient sums over rows, and the forward does not know
    the weights of the rows yet.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: torch.Tensor,
        weight_VD: torch.Tensor,
        bias_V: torch.Tensor | None,
        rows: LabelledRows,
        function: RowFunction,
        has_metric: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        needs_hidden, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        head = Head(hidden_TD, weight_VD, bias_V)
        ctx.dtype = head.compute_dtype
        d_row_RD = None
        if needs_hidden:
            d_row_RD = torch.empty(rows.num_padded, hidden_TD.shape[1], dtype=ctx.dtype, device=hidden_TD.device)
        value_R, metric_R = _evaluate(head, rows, function, has_metric=has_metric, d_row_RD=d_row_RD)
        ctx.hidden_shape, ctx.hidden_dtype = hidden_TD.shape, hidden_TD.dtype
        is_head_trained = needs_weight or needs_bias
        ctx.function = function if is_head_trained else None
        ctx.save_for_backward(d_row_RD, rows.row_R, *(head.inputs if is_head_trained else (None, None, None)))
        # A tensor in a tuple on ctx would outlive the backward.
        ctx.rows = rows._replace(row_R=None)
        if metric_R is not None:
            ctx.mark_non_differentiable(metric_R)
        return value_R, metric_R

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_value_R: torch.Tensor, _: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        d_row_RD, row_R, hidden_TD, weight_VD, bias_V = ctx.saved_tensors
        rows = ctx.rows._replace(row_R=row_R)
        d_value_R = d_value_R[: rows.num_rows]
        d_hidden_TD = d_weight_VD = d_bias_V = None
        if d_row_RD is not None:
            d_row_RD = multiply(d_row_RD[: rows.num_rows], d_value_R, dtype=ctx.hidden_dtype)
            d_hidden_TD = scatter_rows(d_row_RD, row_R, shape=ctx.hidden_shape)
        if ctx.function is not None:
            head = Head(hidden_TD, weight_VD, bias_V)
            needs = ctx.needs_input_grad[1:3]
            d_weight_VD, d_bias_V = _head_gradients(head, rows, ctx.function, d_value_R, dtype=ctx.dtype, needs=needs)
        return d_hidden_TD, d_weight_VD, d_bias_V, None, None, None


def _evaluate(
    head: Head, rows: LabelledRows, function: RowFunction, *, has_metric: bool, d_row_RD: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run a function over all chunks, and write the gradient of each value with respect to its states."""
    wide, device = wide_dtype(head.hidden_TD.dtype), head.hidden_TD.device
    value_R = torch.zeros(rows.num_padded, dtype=wide, device=device)
    metric_R = torch.zeros_like(value_R) if has_metric else None
    for chunk in logit_chunks(head, rows, dtype=head.compute_dtype):
        values, metrics = function(chunk, d_row_RD is not None)
        value_R[chunk.begin : chunk.end] = values
        if metric_R is not None and metrics is not None:
            metric_R[chunk.begin : chunk.end] = metrics
        if d_row_RD is not None:
            with autocast_off(device.type):
                torch.mm(chunk.logits_RV, chunk.weight_VD, out=d_row_RD[chunk.begin : chunk.end])
    return value_R, metric_R


def _head_gradients(
    head: Head,
    rows: LabelledRows,
    function: RowFunction,
    d_value_R: torch.Tensor,
    *,
    dtype: torch.dtype,
    needs: tuple[bool, bool],
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the gradients of weight and bias from recomputed logits.

    The incoming gradients are divided by their largest before the GEMM, so fp16 neither overflows nor loses small ones.
    """
    num_columns, device = head.weight_VD.shape[0], head.hidden_TD.device
    wide = wide_dtype(head.hidden_TD.dtype)
    d_weight_VD = torch.zeros(head.weight_VD.shape, dtype=wide, device=device) if needs[0] else None
    d_bias_V1 = torch.zeros(num_columns, 1, dtype=wide, device=device) if needs[1] else None
    largest = torch.cat([d_value_R.abs(), d_value_R.new_full((1,), torch.finfo(wide).tiny)]).amax()
    with autocast_off(device.type):
        for chunk in logit_chunks(head, rows, dtype=dtype):
            function(chunk, True)
            share_R1 = (d_value_R[chunk.begin : chunk.end] / largest)[:, None]
            if d_weight_VD is not None:
                add_product(d_weight_VD, chunk.logits_RV.T, (chunk.hidden_RD * share_R1).to(dtype))
            if d_bias_V1 is not None:
                add_product(d_bias_V1, chunk.logits_RV.T, share_R1.to(dtype))
    d_weight = None if d_weight_VD is None else multiply(d_weight_VD, largest, dtype=head.weight_VD.dtype)
    if d_bias_V1 is None or head.bias_V is None:
        return d_weight, None
    return d_weight, multiply(d_bias_V1[:, 0], largest, dtype=head.bias_V.dtype)


def scatter_rows(d_row_RD: torch.Tensor, row_R: torch.Tensor | None, *, shape: torch.Size) -> torch.Tensor:
    """Return the gradient of all states from the gradients of the first rows in row_R."""
    num_rows = d_row_RD.shape[0]
    d_hidden_TD = torch.zeros(shape, dtype=d_row_RD.dtype, device=d_row_RD.device)
    if row_R is None:
        d_hidden_TD[:num_rows] = d_row_RD
    else:
        # Each row appears once, so index_copy_ is deterministic.
        d_hidden_TD.index_copy_(0, row_R[:num_rows], d_row_RD)
    return d_hidden_TD


def add_product(sum_VD: torch.Tensor, left_VR: torch.Tensor, right_RD: torch.Tensor) -> None:
    """Add left x right to a wide sum without rounding the product to the narrow dtype of its factors."""
    if left_VR.dtype is sum_VD.dtype:
        sum_VD.addmm_(left_VR, right_RD)
    elif left_VR.device.type in GPU_TYPES:
        torch.addmm(sum_VD, left_VR, right_RD, out_dtype=sum_VD.dtype, out=sum_VD)
    else:
        sum_VD.addmm_(left_VR.to(sum_VD.dtype), right_RD.to(sum_VD.dtype))


def multiply(tensor: torch.Tensor, factor: torch.Tensor, *, dtype: torch.dtype) -> torch.Tensor:
    """Return tensor x factor, with one factor or one per row, multiplied in the factor's fp32.

    PyTorch would round a 0-dim factor to the narrow dtype of the tensor first.
    """
    return torch.mul(tensor, factor.reshape(-1, *[1] * (tensor.ndim - 1)), out=torch.empty_like(tensor, dtype=dtype))


def check_rows(head: Head, rows: LabelledRows) -> None:
    """Raise if a loop over chunks would read the rows wrongly."""
    limit = rows.num_padded
    if rows.row_R is None:
        limit = min(limit, head.hidden_TD.shape[0])
    elif check_tensor("row_R", rows.row_R, ndim=1, dtypes=(torch.int64,)).shape[0] != limit:
        raise ShapeError(f"row_R has {rows.row_R.shape[0]} entries; targets or teacher rows have {limit}.")
    check_int("num_rows", rows.num_rows, low=0, high=limit)
    check_int("chunk_rows", rows.chunk_rows, low=1)


def check_head(head: Head, *, name: str = "") -> None:
    """Raise if the states and the output layer do not match.

    name is a prefix of the tensor names in an error, for example "teacher ".
    """
    check_tensor(f"{name}hidden_TD", head.hidden_TD, ndim=2, dtypes=FLOATING)
    check_tensor(f"{name}weight_VD", head.weight_VD, ndim=2, dtypes=FLOATING)
    (_, width), (num_columns, weight_width) = head.hidden_TD.shape, head.weight_VD.shape
    if width != weight_width:
        raise ShapeError(f"{name}hidden_TD has width {width}, {name}weight_VD has {weight_width}.")
    if head.hidden_TD.dtype is not head.weight_VD.dtype and not is_autocast_on(head.hidden_TD.device.type):
        raise ShapeError(
            f"{name}hidden_TD is {head.hidden_TD.dtype} and {name}weight_VD is {head.weight_VD.dtype}; cast one of "
            "them or train under autocast."
        )
    if head.bias_V is not None and head.bias_V.shape != (num_columns,):
        raise ShapeError(f"{name}bias_V has shape {tuple(head.bias_V.shape)}, {name}weight_VD has {num_columns} rows.")
    if head.softcap is not None and head.softcap == 0:
        raise OptionError("softcap must not be 0; use None for no soft cap.")
