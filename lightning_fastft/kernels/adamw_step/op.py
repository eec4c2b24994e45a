"""One AdamW step and the gradients' norm for all tensors of a table, in one launch per combination of dtypes.

Nothing here builds a graph or needs a host sync: the clipping factor is a tensor, and the table of addresses is copied
asynchronously.
"""

from __future__ import annotations

import torch

from lightning_fastft.core.checks import check_float, check_int, check_tensor
from lightning_fastft.core.errors import OptionError, ShapeError
from lightning_fastft.kernels.adamw_step import reference
from lightning_fastft.kernels.adamw_step.reference import SkipFlag, StepOptions
from lightning_fastft.kernels.adamw_step.table import TensorTable
from lightning_fastft.kernels.backends import choose_module

__all__ = ["SkipFlag", "StepOptions", "TensorTable", "adamw_step", "grad_norm"]


def adamw_step(
    table: TensorTable,
    *,
    options: StepOptions,
    scale: torch.Tensor | None = None,
    skip: SkipFlag | None = None,
) -> None:
    """Update the masters, moments and copies of a table in place by one AdamW step.

    In fp32: ``g = scale * grad; m += (1 - beta1) * (g - m); v = beta2 * v + (1 - beta2) * g * g; p -= lr * weight_decay
    * p + lr / (1 - beta1^step) * m / (sqrt(v) / sqrt(1 - beta2^step) + eps)``. The reference subtracts the decay first,
    like torch.optim.AdamW, with the same bits on a CPU; the kernel sums both changes first and rounds once less. Master
    and copy are rounded to nearest, the copy from the new master. With ``options.rounding_seed`` a bf16 master is
    rounded stochastically, with random numbers of ``rounding.random_halves``.

    A tensor without gradient does not change. NaN and infinity in scale or a gradient propagate to the element, as in
    torch.optim.AdamW.

    Args:
        table: The tensors. Gradients are read, not changed.
        options: Learning rate, betas, eps, decay and the number of the step, the same for all tensors: make one table
            per set of options.
        scale: Factor on each gradient in fp32, such as a clipping factor. Shape (), fp32, device of the table. None for
            1.
        skip: Flag that skips the step, and the number of steps skipped before; step in the formula then excludes these.
            None never skips. A flag of 0 gives the same bits as None, if float64 powers are equal on host and device.

    Raises:
        ShapeError: scale, skip, a learning rate that is a tensor, or a tensor of the table has a wrong shape, dtype,
            device or layout.
        OptionError: A number of the options is not allowed.

    Cost:
        One launch per combination of dtypes, no new memory. With an fp32 master 28 bytes per element (26 with a narrow
        gradient), and 2 for a copy. The host compares addresses, see ``TensorTable.refresh``; no host sync. The
        reference needs several launches per tensor. A flag adds ten launches on single numbers; a skipped
        step reads and writes no element.

    Source:
        AdamW, arXiv 1711.05101. Stochastic rounding of weights, arXiv 2010.06192.

    Example:
        >>> param = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
        >>> param.grad = torch.tensor([0.5, 0.0])
        >>> table = TensorTable([param], exp_avgs=[torch.zeros(2)], exp_avg_sqs=[torch.zeros(2)])
        >>> adamw_step(table, options=StepOptions(learning_rate=0.1, weight_decay=0.0, step=1), scale=torch.tensor(0.5))
        >>> param.data
        tensor([ 0.9000, -2.0000])
    """
    _check_table(table)
    _check_options(options, table.device)
    if scale is not None:
        _check_number("scale", scale, table.device)
    if skip is not None:
        _check_number("skip.found_inf", skip.found_inf, table.device)
        _check_number("skip.num_skipped", skip.num_skipped, table.device, dtype=torch.float64)
    module = choose_module(reference, table.address_AR, dtypes=None)
    with torch.no_grad():
        module.adamw_step(table, options=options, scale=scale, skip=skip)


def grad_norm(table: TensorTable) -> torch.Tensor:
    """Return the L2 norm of all gradients of a table together, as one tensor.

    The order of a sum depends on whether addresses are multiples of 16 bytes: two calls are bit-equal, and so are two
    runs whose gradients have the same alignment. NaN or infinity in a gradient makes the norm NaN or infinite. The norm
    over several tables is the norm of their norms, ``torch.linalg.vector_norm(torch.stack(norms))``.

    Args:
        table: The tensors; a missing gradient counts as 0.

    Returns:
        Shape (), fp32, device of the table, no graph.

    Raises:
        ShapeError: A tensor of the table has a wrong shape, dtype, device or layout.
        OptionError: table is not a TensorTable.

    Cost:
        Reads each gradient once, in one launch per combination of dtypes and one more; no host sync. The reference
        makes float64 copies.

    Source:
        own

    Example:
        >>> param = torch.nn.Parameter(torch.zeros(2))
        >>> param.grad = torch.tensor([3.0, -4.0])
        >>> grad_norm(TensorTable([param], exp_avgs=[torch.zeros(2)], exp_avg_sqs=[torch.zeros(2)]))
        tensor(5.)
    """
    _check_table(table)
    with torch.no_grad():
        return choose_module(reference, table.address_AR, dtypes=None).grad_norm(table)


def _check_table(table: TensorTable) -> None:
    """Raise on anything but a TensorTable."""
    if not isinstance(table, TensorTable):
        raise OptionError(f"table must be a TensorTable, got {type(table).__name__}.")


def _check_options(options: StepOptions, device: torch.device) -> None:
    """Raise on numbers for which AdamW is not defined."""
    if not isinstance(options, StepOptions):
        raise OptionError(f"options must be StepOptions, got {type(options).__name__}.")
    check_int("options.step", options.step, low=1)
    for name in ("beta1", "beta2"):
        if check_float(f"options.{name}", getattr(options, name), low=0.0) >= 1.0:
            raise OptionError(
                f"options.{name} must be below 1, got {getattr(options, name)}; the moment would ignore every gradient."
            )
    check_float("options.eps", options.eps, low=0.0)
    if options.rounding_seed is not None:
        check_int("options.rounding_seed", options.rounding_seed, low=0, high=2**63 - 1)
    check_float("options.weight_decay", options.weight_decay, low=0.0)
    if isinstance(options.learning_rate, torch.Tensor):
        _check_number("options.learning_rate", options.learning_rate, device)
    else:
        check_float("options.learning_rate", options.learning_rate, low=0.0)


def _check_number(name: str, number: torch.Tensor, device: torch.device, *, dtype: torch.dtype = torch.float32) -> None:
    """Raise on a tensor that is not one number of this dtype on the device."""
    check_tensor(name, number, ndim=0, dtypes=(dtype,))
    if number.device != device:
        raise ShapeError(
            f"{name} is on {number.device}; the table is on {device}. Create it there: "
            "torch.full((), value, device=...)."
        )
