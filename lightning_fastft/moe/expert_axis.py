"""Expert parallelism: the ranks of an axis own the experts of each layer in equal shares and exchange tokens.

Every rank gets the tokens of all ranks (all-gather), runs its own experts on them, and returns to each rank the sums of
its tokens' outputs. Sizes never depend on the routing, so no count leaves the device. A token is sent once to each
rank, not once per expert. With 8 experts per token, an exchange of only the routed tokens would still send 99.6 % of
all tokens to each of 2 ranks, and 66 % to each of 8 ranks.

Axes: R rows of one rank, padded to the longest pack of the axis, T = R * ranks, K experts per token, D model width,
    E experts, N = R * K routed slots.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from lightning_fastft.core.errors import ShapeError
from lightning_fastft.core.linear_map import linear_map
from lightning_fastft.moe.expert_linears import ExpertAdapter

# Attribute of experts modules whose stacks are owned in shares, not in the state_dict: the ExpertAxis.
AXIS_ATTRIBUTE = "fastft_expert_axis"

# torch 2.13 renamed it.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class ExpertAxis:
    """The ranks that own the experts of each layer in equal shares: rank r of n owns the r-th E / n.

    Gradients of owned experts are sums over the tokens of the whole axis, while data parallelism divides the sum over
    all ranks by their number. So the backward divides incoming gradients by the size of the axis. It multiplies the
    gradients of the tokens, and those of adapters, which every rank holds whole, by this size again.

    Example:
        >>> find_axis(nn.Linear(2, 2)) is None
        True
    """

    def __init__(self, group: Any) -> None:
        self.group = group
        self.size: int = dist.get_world_size(group)
        self.rank: int = dist.get_rank(group)
        # Tokens of the longest pack of this step on any rank; 0 if all ranks run the same tokens.
        self.num_rows = 0

    def gather(
        self, x_RD: torch.Tensor, expert_RK: torch.Tensor, weight_RK: torch.Tensor, *, num_experts: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return states, experts and routing weights of the tokens of all ranks, given those of this rank.

        Experts are numbered from the first one that this rank owns; numbers outside of its share are sentinels.

        Raises:
            ShapeError: There are more tokens than the ranks agreed on.

        Cost:
            Sends R * (D + 2 K) values to every other rank; in the backward each sends as many back. No host sync.
        """
        num_rows = self.num_rows or x_RD.shape[0]
        num_missing = num_rows - x_RD.shape[0]
        if num_missing < 0:
            raise ShapeError(
                f"A layer got {x_RD.shape[0]} tokens, and the ranks of the expert axis agreed on {num_rows}, the "
                "longest pack of this step. Call the model once per packed batch."
            )
        if num_missing:
            x_RD, weight_RK = (functional.pad(rows, (0, 0, 0, num_missing)) for rows in (x_RD, weight_RK))
            expert_RK = functional.pad(expert_RK, (0, 0, 0, num_missing), value=num_experts)
        needs = [rows.requires_grad for rows in (x_RD, weight_RK)]
        # Both backward exchanges are in one node, so all ranks have one order.
        x_TD, weight_TK = linear_map(
            lambda *rows: tuple(_gather(each, self) for each in rows),
            lambda *grads: tuple(_sum(d, self).mul_(self.size) if need else None for d, need in zip(grads, needs)),
            x_RD,
            weight_RK,
        )
        first = self.rank * (num_experts // self.size)
        expert_TK = _gather(expert_RK.to(torch.int32), self) - first
        return x_TD, expert_TK, weight_TK

    def scatter(self, y_TD: torch.Tensor, *, num_tokens: int) -> torch.Tensor:
        """Return the sum over all ranks of the outputs of this rank's tokens, shape (num_tokens, D).

        Each partial sum is rounded once, and added in fp32.

        Cost:
            As gather, and one pass over T * D values.
        """
        y_RD: torch.Tensor = linear_map(
            lambda y_TD: _sum(y_TD, self), lambda d_y_RD: (_gradient_of_sum(d_y_RD, self),), y_TD
        )
        return y_RD[:num_tokens]


def find_axis(module: nn.Module) -> ExpertAxis | None:
    """Return the axis of an experts module; None if it has all experts."""
    axis: ExpertAxis | None = vars(module).get(AXIS_ATTRIBUTE)
    return axis


@contextmanager
def on_equal_tokens(model: nn.Module) -> Iterator[None]:
    """Run the forwards in a block on equal numbers of tokens on all ranks, as ``generate`` does: outside of a step no
    rank pads to the longest pack.
    """
    axes = {axis for module in model.modules() if (axis := find_axis(module)) is not None}
    held = {axis: axis.num_rows for axis in axes}
    try:
        for axis in axes:
            axis.num_rows = 0
        yield
    finally:
        for axis, num_rows in held.items():
            axis.num_rows = num_rows


def share_adapter(adapter: ExpertAdapter, axis: ExpertAxis) -> ExpertAdapter:
    """Return this rank's experts of an adapter that every rank holds whole.

    Cost:
        Views; the backward writes a whole gradient, 0 for the experts of other ranks.
    """
    num_owned = adapter.a_EIR.shape[0] // axis.size
    a_EIR, b_ERO = (
        linear_map(
            lambda owned: owned.view_as(owned),
            lambda d_owned: (d_owned * axis.size,),
            factor.narrow(0, axis.rank * num_owned, num_owned),
        )
        for factor in (adapter.a_EIR, adapter.b_ERO)
    )
    return ExpertAdapter(a_EIR, b_ERO, adapter.scale)


def _gradient_of_sum(d_y_RD: torch.Tensor, axis: ExpertAxis) -> torch.Tensor:
    """Return the gathered gradient divided by the number of ranks."""
    return _gather(d_y_RD / axis.size, axis)


def _gather(rows: torch.Tensor, axis: ExpertAxis) -> torch.Tensor:
    """Return the rows of all ranks, in the order of the ranks."""
    gathered = rows.new_empty(axis.size * rows.shape[0], rows.shape[1])
    _all_gather(gathered, rows.contiguous(), group=axis.group)
    return gathered


def _sum(rows: torch.Tensor, axis: ExpertAxis) -> torch.Tensor:
    """Return the rows of this rank, summed over all ranks."""
    received = torch.empty_like(rows, memory_format=torch.contiguous_format)
    dist.all_to_all_single(received, rows.contiguous(), group=axis.group)
    return received.view(axis.size, -1, rows.shape[1]).sum(dim=0)
