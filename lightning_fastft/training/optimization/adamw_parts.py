"""The parts of a step of FusedAdamW: parameters that one pass over memory steps together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from lightning_fastft.core.errors import OptionError, ShapeError
from lightning_fastft.core.shards import local_values
from lightning_fastft.kernels.adamw_step.op import StepOptions, TensorTable
from lightning_fastft.kernels.adamw_step.rows import TableRow
from lightning_fastft.training.optimization.adamw_shards import Groups
from lightning_fastft.training.optimization.adamw_state import ABSMAXS, MASTER, MOMENTS
from lightning_fastft.training.optimization.host_moments import Piece


class Part(NamedTuple):
    """The parameters of one group that have a gradient, are shared by the same ranks and have made the same steps.

    num_done counts the steps, those that a guard skipped included. The counts in the states of the parameters are views
    of ``steps``. Pieces are of rows whose moments are on the host.
    """

    group: dict[str, Any]
    table: TensorTable
    num_done: int
    steps: torch.Tensor
    shard_groups: Groups
    pieces: list[Piece]


def make_row(
    param: torch.Tensor, state: dict[str, Any], copy: torch.Tensor | None, *, number: int, first: int
) -> TableRow:
    """Return what a step writes for a parameter, of a sharded one in this rank: with a master, the parameter is the
    low-precision copy. Number and first element place its random numbers.
    """
    own = local_values(param)
    held = {name: local_values(tensor) for name, tensor in state.items()}
    param_and_copy = (held[MASTER], own) if MASTER in held else (own, copy)
    exp_avg, exp_avg_sq = (held[name] for name in MOMENTS)
    absmaxs = [held.get(name) for name in ABSMAXS]
    return TableRow(
        param_and_copy[0], exp_avg, exp_avg_sq, param_and_copy[1], param, absmaxs[0], absmaxs[1], number, first
    )


def mark_of(param: torch.Tensor) -> tuple[int, ...]:
    """Return numbers that change when other code writes or replaces the values of a parameter."""
    own = local_values(param)
    # Operators on a DTensor raise its own version, kernels that of the shard.
    return param._version, own._version, own.data_ptr()


def follow_values(master: torch.Tensor, param: torch.Tensor) -> None:
    """Write the values of a parameter to its master where the master does not round to them.

    Weights that are loaded after the state of their optimizer, or swapped and swapped back, keep their masters.
    """
    own, wide = local_values(param.detach()), local_values(master)
    wide.copy_(torch.where(wide.to(own.dtype) == own, wide, own.float()))


def read_options(part: Part, *, rounding_seed: int | None) -> StepOptions:
    """Return the numbers of a part's next step."""
    group, rate = part.group, part.group["lr"]
    if isinstance(rate, torch.Tensor) and rate.device.type == "cpu":
        rate = float(rate)
    beta1, beta2 = group["betas"]
    return StepOptions(
        learning_rate=rate,
        step=part.num_done + 1,
        beta1=beta1,
        beta2=beta2,
        eps=group["eps"],
        weight_decay=group["weight_decay"],
        rounding_seed=rounding_seed,
    )


def make_table(rows: list[TableRow]) -> TensorTable:
    """Return the table of some rows."""
    params, exp_avgs, exp_avg_sqs, copies, owners, *absmaxs, numbers, firsts, _ = zip(*rows)
    return TensorTable(
        params,
        exp_avgs=exp_avgs,
        exp_avg_sqs=exp_avg_sqs,
        copies=copies,
        owners=owners,
        exp_avg_absmaxs=absmaxs[0],
        exp_avg_sq_absmaxs=absmaxs[1],
        numbers=numbers,
        firsts=firsts,
    )


@contextmanager
def naming_the_alternative() -> Iterator[None]:
    """Say in an error about a tensor which optimizer takes it."""
    try:
        yield
    except ShapeError as error:
        raise OptionError(f"FusedAdamW cannot step these tensors. {error} Or use torch.optim.AdamW.") from error
