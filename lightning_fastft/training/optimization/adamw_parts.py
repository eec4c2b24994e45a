"""The parts of a step of FusedAdamW: parameters that one pass over memory steps together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from lightning_fastft.core.errors import OptionError, ShapeError
from lightning_fastft.kernels.adamw_step.op import StepOptions, TensorTable
from lightning_fastft.kernels.adamw_step.reference import TableRow
from lightning_fastft.training.optimization.adamw_state import ABSMAXS, MASTER, MOMENTS
from lightning_fastft.training.optimization.skipped_steps import Cohort


class Part(NamedTuple):
    """The parameters of one group that have a gradient and have made the same steps; with a cohort, num_done
    counts those that were skipped too.
    """

    group: dict[str, Any]
    table: TensorTable
    num_done: int
    steps: list[torch.Tensor]
    cohort: Cohort | None


def make_row(param: torch.Tensor, state: dict[str, Any], copy: torch.Tensor | None) -> TableRow:
    """Return what a step writes for a parameter: with a master, the parameter is the low-precision copy."""
    param_and_copy = (state[MASTER], param) if MASTER in state else (param, copy)
    exp_avg, exp_avg_sq = (state[name] for name in MOMENTS)
    return TableRow(
        param_and_copy[0], exp_avg, exp_avg_sq, param_and_copy[1], param, *(state.get(name) for name in ABSMAXS)
    )


def read_options(part: Part) -> StepOptions:
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
    )


def find_table(tables: dict[int, TensorTable], rows: list[TableRow]) -> TensorTable:
    """Return the table of the step before where it holds these very tensors, else a new one."""
    table = tables.get(id(rows[0].owner))
    kept = () if table is None else table.rows
    if (
        table is not None
        and len(kept) == len(rows)
        and all(one is other for pair in zip(kept, rows) for one, other in zip(*pair))
    ):
        return table
    params, exp_avgs, exp_avg_sqs, copies, owners, *absmaxs = zip(*rows)
    return TensorTable(
        params,
        exp_avgs=exp_avgs,
        exp_avg_sqs=exp_avg_sqs,
        copies=copies,
        owners=owners,
        exp_avg_absmaxs=absmaxs[0],
        exp_avg_sq_absmaxs=absmaxs[1],
    )


@contextmanager
def naming_the_alternative() -> Iterator[None]:
    """Say in an error about a tensor which optimizer takes it."""
    try:
        yield
    except ShapeError as error:
        raise OptionError(f"FusedAdamW cannot step these tensors. {error} Or use torch.optim.AdamW.") from error
