"""What the ranks of a context-parallel group exchange: rows of a pack for attention heads and back, and the loss.

Axes: T tokens of the pack, P parts of it, R = T / P rows of one part, H query heads, G key/value heads, N = H / P and
M = G / P heads of one rank, W width of a head, C columns of the heads that one rank computes.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import torch.distributed as dist

from lightning_fastft.core.errors import BackendError
from lightning_fastft.core.linear_map import linear_map
from lightning_fastft.packing.parts import PackPart


def gather_rows(
    q_RHW: torch.Tensor, k_RGW: torch.Tensor, v_RGW: torch.Tensor, *, part: PackPart
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the heads of this rank for all rows of the pack, from all heads for the rows of this rank.

    Rank i of the group gets the i-th share of the query heads and the key/value heads that they read. With fewer
    key/value heads than ranks, or a number that the ranks do not divide, each is repeated first.

    Args:
        q_RHW: Queries, shape (R, H, W).
        k_RGW: Keys, shape (R, G, W).
        v_RGW: Values, shape (R, G, any width).
        part: The part of the pack that this rank holds.

    Returns:
        Shapes (T, N, W), (T, M, W) and (T, M, any width), differentiable.

    Raises:
        BackendError: The ranks do not divide the query heads.

    Cost:
        One all-to-all of the three tensors in the forward and one in the backward, and two copies of them.

    Source:
        arXiv 2309.14509 (DeepSpeed Ulysses).
    """
    num_parts = part.num_parts
    check_heads(q_RHW.shape[1], num_parts=num_parts)
    # lcm(G, P) key/value heads: the smallest number of which each rank gets a whole share. It divides H, as G and P do.
    num_repeats = num_parts // math.gcd(k_RGW.shape[1], num_parts)
    if num_repeats > 1:
        k_RGW, v_RGW = (x.repeat_interleave(num_repeats, dim=1) for x in (k_RGW, v_RGW))
    q_TNW, k_TMW, v_TMW = _exchange(part, True, q_RHW, k_RGW, v_RGW)
    return q_TNW, k_TMW, v_TMW


def gather_heads(out_TNW: torch.Tensor, *, part: PackPart) -> torch.Tensor:
    """Return all heads for the rows of this rank, shape (R, H, W), from the heads of this rank for all rows.

    Cost:
        One all-to-all in the forward and one in the backward, and two copies.
    """
    (out_RHW,) = _exchange(part, False, out_TNW)
    return out_RHW


def share_of_heads(x_H: torch.Tensor, *, part: PackPart) -> torch.Tensor:
    """Return the values of the query heads of this rank."""
    num_heads = x_H.shape[0] // part.num_parts
    return x_H[part.rank * num_heads : (part.rank + 1) * num_heads]


def check_heads(num_heads: int, *, num_parts: int) -> None:
    """Raise if the ranks of a group do not divide the query heads.

    Raises:
        BackendError: They do not.
    """
    if num_heads % num_parts:
        raise BackendError(
            f"context_parallel={num_parts} shares out the {num_heads} query heads of each layer, which it does not "
            f"divide. Use a divisor of {num_heads}."
        )


def sum_over_parts(loss: torch.Tensor, *, part: PackPart) -> torch.Tensor:
    """Return the loss of the whole pack, on every rank of the group, from the loss of each part.

    Data parallelism averages gradients over all ranks, but the gradients of the parts must be added: so the gradient is
    the number of parts times that of this rank's loss.

    Cost:
        One all-reduce of a number; no host sync.
    """

    def add(loss: torch.Tensor) -> torch.Tensor:
        total = loss.clone()
        dist.all_reduce(total, group=part.group)
        return total

    total: torch.Tensor = linear_map(add, lambda d_total: (_loss_gradient(d_total, part),), loss)
    return total


def _loss_gradient(d_total: torch.Tensor, part: PackPart) -> torch.Tensor:
    return d_total * part.num_parts


def _exchange(part: PackPart, to_heads: bool, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Send heads or rows, differentiably: the backward is the exchange in the other direction.

    All tensors go in one collective, so that every rank meets the collectives in one order.
    """
    send = functools.partial(_send, group=part.group, num_parts=part.num_parts)
    found: tuple[torch.Tensor, ...] = linear_map(
        functools.partial(send, to_heads=to_heads), functools.partial(send, to_heads=not to_heads), *tensors
    )
    return found


def _send(*tensors: torch.Tensor, group: Any, num_parts: int, to_heads: bool) -> tuple[torch.Tensor, ...]:
    """Send every rank its heads of these rows, or (to_heads=False) its rows of these heads."""
    num_rows, first = tensors[0].shape[0], tensors[0]
    num_rows_each = num_rows if to_heads else num_rows // num_parts
    # Columns of each tensor that go to one rank.
    sizes = [x[0].numel() // (num_parts if to_heads else 1) for x in tensors]
    sent_PRC = first.new_empty(num_parts, num_rows_each, sum(sizes))
    for place_PRC, x in zip(sent_PRC.split(sizes, dim=2), tensors):
        if to_heads:
            place_PRC.copy_(x.reshape(num_rows, num_parts, -1).transpose(0, 1))
        else:
            place_PRC.copy_(x.reshape(num_parts, num_rows_each, -1))
    got_PRC = torch.empty_like(sent_PRC)
    dist.all_to_all_single(got_PRC, sent_PRC, group=group)
    parts = got_PRC.split(sizes, dim=2)
    if to_heads:
        return tuple(
            part.reshape(num_parts * num_rows_each, x.shape[1] // num_parts, x.shape[2])
            for part, x in zip(parts, tensors)
        )
    return tuple(
        part.transpose(0, 1).reshape(num_rows_each, x.shape[1] * num_parts, x.shape[2])
        for part, x in zip(parts, tensors)
    )
