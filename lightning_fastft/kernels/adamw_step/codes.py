"""AdamW's 8-bit moments: one code per value, and the largest magnitude of each block of 256 values.

Axes: B blocks of a tensor, the last one may be shorter; V values of a block.

A code is an index into a fixed map; its value is the map's entry times the magnitude of its block. The map is the
dynamic map of bitsandbytes in ascending order: 0, seven decades from 1e-7 to 1, and 1. Each decade has twice as many
values as the decade below it, in the middles of equal cells. The signed map has 1 to 64 values per decade, and the
negatives of all except 1; the unsigned map has 2 to 128 per decade. A value gets the nearest code. The zones of the
kernel are the decades, with 0 below and 1 above them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

BLOCK = 256
NUM_CODES = 256
NUM_DECADES = 7
# Entries for slopes after the values of a map in the kernel's table.
NUM_SLOPES = 16


def dynamic_map(*, is_signed: bool) -> torch.Tensor:
    """Return the values of the codes, ascending. Shape (256,), float64.

    Example:
        >>> values = dynamic_map(is_signed=True)
        >>> [round(values[code].item(), 4) for code in (0, 126, 127, 128, 255)]
        [-0.993, -0.0, 0.0, 0.0, 1.0]
    """
    positive = [
        _decade(place) * (0.1 + 0.9 * (cell + 0.5) / cells)
        for place, cells in _cells(is_signed=is_signed)
        for cell in range(cells)
    ]
    negative = [-value for value in reversed(positive)] if is_signed else []
    return torch.tensor([*negative, 0.0, *positive, 1.0], dtype=torch.float64)


def zero_code(*, is_signed: bool) -> int:
    """Return the code of 0."""
    return NUM_CODES // 2 - 1 if is_signed else 0


def thresholds(*, is_signed: bool) -> list[float]:
    """Return the start of each zone above the first: the midpoint of the last value of a zone and the first of the
    next.
    """
    values = dynamic_map(is_signed=is_signed)[zero_code(is_signed=is_signed) :].tolist()
    firsts = [1]
    for _, cells in _cells(is_signed=is_signed):
        firsts.append(firsts[-1] + cells)
    return [(values[first - 1] + values[first]) / 2 for first in firsts]


def slopes(*, is_signed: bool) -> list[float]:
    """Return, per zone, the number of codes per unit of magnitude; 0 for the zone of 0."""
    inner = [cells / (0.9 * _decade(place)) for place, cells in _cells(is_signed=is_signed)]
    # The kernel's offset is 8/9 of the code of 1; the slope adds the rest and half a code.
    top = 2 * _cells(is_signed=is_signed)[-1][1]
    return [0.0, *inner, top / 9 + 0.5]


def kernel_table() -> torch.Tensor:
    """Return values and slopes of the signed and the unsigned map. Shape (2, 272), fp32."""
    rows = []
    for is_signed in (True, False):
        found = slopes(is_signed=is_signed)
        padded = torch.tensor(found + [0.0] * (NUM_SLOPES - len(found)), dtype=torch.float64)
        rows.append(torch.cat([dynamic_map(is_signed=is_signed), padded]))
    return torch.stack(rows).float()


def num_blocks(num_values: int) -> int:
    """Return the number of blocks of a tensor with num_values values."""
    return -(-num_values // BLOCK)


def decode(codes: torch.Tensor, absmax_B: torch.Tensor, *, is_signed: bool) -> torch.Tensor:
    """Return the values of codes.

    Args:
        codes: Any shape, uint8, contiguous.
        absmax_B: Largest magnitude of each block of 256 values, in memory order. fp32.
        is_signed: Whether the codes belong to the signed map.

    Returns:
        Shape of codes, fp32.

    Example:
        >>> codes, absmax_B = encode(torch.tensor([0.5, -2.0, 0.0]), is_signed=True)
        >>> decode(codes, absmax_B, is_signed=True)
        tensor([ 0.4953, -1.9859,  0.0000])
    """
    values = dynamic_map(is_signed=is_signed).to(device=codes.device, dtype=torch.float32)[codes.long()]
    return (values.flatten() * absmax_B.repeat_interleave(BLOCK)[: codes.numel()]).view_as(codes)


def encode(values: torch.Tensor, *, is_signed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the nearest codes and the largest magnitude of each block, the inputs of ``decode``.

    Args:
        values: Any shape, fp32, contiguous; not negative for the unsigned map. A block with NaN or infinity becomes
            meaningless.
        is_signed: Whether to use the signed map.

    Example:
        >>> encode(torch.tensor([0.0, 3.0]), is_signed=False)
        (tensor([  0, 255], dtype=torch.uint8), tensor([3.]))
    """
    num_values = values.numel()
    blocks_BV = torch.nn.functional.pad(values.flatten(), (0, num_blocks(num_values) * BLOCK - num_values)).view(
        -1, BLOCK
    )
    absmax_B = blocks_BV.abs().amax(1)
    inverse_B = torch.where(absmax_B > 0, 1 / absmax_B, 0.0)
    grid = dynamic_map(is_signed=is_signed).to(values.device)
    codes_BV = torch.bucketize((blocks_BV * inverse_B[:, None]).double(), (grid[1:] + grid[:-1]) / 2)
    return codes_BV.flatten()[:num_values].view_as(values).to(torch.uint8), absmax_B


def _cells(*, is_signed: bool) -> Sequence[tuple[int, int]]:
    """Return the index of each decade and its number of values."""
    return [(place, 2 ** (place if is_signed else place + 1)) for place in range(NUM_DECADES)]


def _decade(place: int) -> float:
    """Return the upper bound of a decade."""
    return 10.0 ** (place - NUM_DECADES + 1)
