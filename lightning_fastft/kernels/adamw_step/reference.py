"""AdamW in plain PyTorch, on the tensors of a table (``table.py``)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from lightning_fastft.kernels.adamw_step import codes
from lightning_fastft.kernels.adamw_step.rounding import random_halves, round_stochastically
from lightning_fastft.kernels.adamw_step.rows import TableRow
from lightning_fastft.kernels.adamw_step.table import TensorTable
from lightning_fastft.kernels.backends import one_kernel


class StepOptions(NamedTuple):
    """The numbers of one AdamW step, shared by all tensors of a table.

    Args:
        learning_rate: Learning rate, a number of at least 0; or a tensor of shape () in fp32 on the device of the
            table, which the host never reads.
        beta1: Decay of the first moment, in [0, 1).
        beta2: Decay of the second moment, in [0, 1).
        eps: Added to the denominator, at least 0.
        weight_decay: Decoupled decay per unit of learning rate, at least 0.
        step: Number of this step, from 1, for the bias corrections, which the host computes in float64.
        rounding_seed: Seed of stochastic rounding of bf16 masters, from 0 to 2^63 - 1; None rounds to nearest.

    Source:
        AdamW, arXiv 1711.05101; defaults of torch.optim.AdamW.

    Example:
        >>> StepOptions(learning_rate=2e-4, step=1).beta2
        0.999
    """

    learning_rate: float | torch.Tensor
    step: int
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.01
    rounding_seed: int | None = None


class SkipFlag(NamedTuple):
    """Flag that skips a step, and the number of steps skipped before: device tensors that the host never reads.

    Args:
        found_inf: 0 to run the step, anything else (NaN too) to skip it; the name is torch's. Shape (), fp32, device of
            the table.
        num_skipped: Number of skipped steps among the earlier steps that ``StepOptions.step`` counts. Shape (),
            float64, device of the table.

    Source:
        ``found_inf`` of torch.optim's fused optimizers.

    Example:
        >>> flag = SkipFlag(found_inf=torch.ones(()), num_skipped=torch.zeros((), dtype=torch.float64))
        >>> bool(flag.found_inf)
        True
    """

    found_inf: torch.Tensor
    num_skipped: torch.Tensor


@one_kernel
def adamw_step(
    table: TensorTable, *, options: StepOptions, scale: torch.Tensor | None = None, skip: SkipFlag | None = None
) -> None:
    """Update masters, moments and copies in the order of operations of torch.optim.AdamW.

    In fp32 without scale the bits are the same on a CPU.
    """
    corrections = bias_corrections(options) if skip is None else _corrections_on_device(options, skip)
    for row, grad in zip(table.rows, table.gradients()):
        if grad is not None and row.is_stepped:
            grad = grad.float() if row.start is None else _piece_of(grad, row).float()
            step = options.step if skip is None else options.step - skip.num_skipped
            grad = grad if scale is None else grad * scale
            _step_row_unless(row, grad, options, corrections, step=step, skip=skip)


@one_kernel
def grad_norm(table: TensorTable) -> torch.Tensor:
    """Return the L2 norm of all gradients together, from sums in float64."""
    sums = [grad.double().square().sum() for grad in table.gradients() if grad is not None]
    return torch.stack(sums).sum().sqrt().float() if sums else torch.zeros((), device=table.device)


def bias_corrections(options: StepOptions) -> tuple[float, float]:
    """Return the bias correction of the first moment, and the root of the second, in float64."""
    return 1.0 - options.beta1**options.step, math.sqrt(1.0 - options.beta2**options.step)


def bias_corrections_on_device(options: StepOptions, num_skipped: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the bias corrections of the step number without skipped steps; shape (), float64."""
    step = options.step - num_skipped
    return 1.0 - torch.pow(options.beta1, step), torch.sqrt(1.0 - torch.pow(options.beta2, step))


def _corrections_on_device(options: StepOptions, skip: SkipFlag) -> tuple[torch.Tensor, torch.Tensor]:
    """Return bias corrections that round like on the host, which divides the learning rate in float64."""
    correction, root_correction = bias_corrections_on_device(options, skip.num_skipped)
    if isinstance(options.learning_rate, torch.Tensor):
        correction = correction.float()
    return correction, root_correction.float()


def _step_row_unless(
    row: TableRow,
    grad: torch.Tensor,
    options: StepOptions,
    corrections: Sequence[float | torch.Tensor],
    *,
    step: int | torch.Tensor,
    skip: SkipFlag | None,
) -> None:
    """Update one tensor, and restore its values if the flag skips the step; no host sync."""
    written = [] if skip is None else row.written()
    before = [tensor.clone() for tensor in written]
    _step_row(row, grad, options, corrections, step=step)
    for tensor, old in zip(written, before):
        assert skip is not None
        tensor.copy_(torch.where(skip.found_inf == 0, tensor, old))


def _step_row(
    row: TableRow,
    grad: torch.Tensor,
    options: StepOptions,
    corrections: Sequence[float | torch.Tensor],
    *,
    step: int | torch.Tensor,
) -> None:
    """Update one tensor in fp32; only the master, its copy and 8-bit moments are rounded, once each."""
    if row.exp_avg_absmax is not None and row.exp_avg_sq_absmax is not None:
        stored = ((row.exp_avg, row.exp_avg_absmax.view(-1)), (row.exp_avg_sq, row.exp_avg_sq_absmax.view(-1)))
        averages = [codes.decode(*pair, is_signed=is_signed) for pair, is_signed in zip(stored, (True, False))]
        wide = row._replace(exp_avg=averages[0], exp_avg_sq=averages[1], exp_avg_absmax=None, exp_avg_sq_absmax=None)
        _step_row(wide, grad, options, corrections, step=step)
        for pair, average, is_signed in zip(stored, averages, (True, False)):
            for tensor, new in zip(pair, codes.encode(average, is_signed=is_signed)):
                tensor.copy_(new)
        return
    rate, (correction, root_correction) = options.learning_rate, corrections
    param = row.param.float()
    param.mul_(1 - rate * options.weight_decay)
    row.exp_avg.lerp_(grad, 1 - options.beta1)
    row.exp_avg_sq.mul_(options.beta2).addcmul_(grad, grad, value=1 - options.beta2)
    denominator = (row.exp_avg_sq.sqrt() / root_correction).add_(options.eps)
    if isinstance(rate, torch.Tensor) or isinstance(correction, torch.Tensor):
        param.sub_(rate / correction * row.exp_avg / denominator)
    else:
        param.addcdiv_(row.exp_avg, denominator, value=-rate / correction)
    # An fp32 master is its own fp32 copy.
    if options.rounding_seed is None or row.param.dtype is torch.float32:
        row.param.copy_(param)
    else:
        noise = random_halves(param.shape, seed=options.rounding_seed, step=step, number=row.number, first=row.first)
        row.param.copy_(round_stochastically(param, noise.to(param.device)))
    if row.copy is not None:
        row.copy.copy_(row.param)


def _piece_of(grad: torch.Tensor, row: TableRow) -> torch.Tensor:
    """Return the part of a gradient that belongs to a row, in the shape of the row."""
    start = row.start or 0
    return grad.view(-1)[start : start + row.param.numel()].view(row.param.shape)
