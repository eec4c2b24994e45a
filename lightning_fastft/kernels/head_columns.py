"""Positions of heads among the columns of a fused projection.

Axes: T tokens, C columns of the projection, H heads, W columns of a head.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class HeadColumns(NamedTuple):
    """Columns of heads that a projection holds in groups.

    The heads of a group are adjacent; groups start group_step columns apart.

    Args:
        begin: Column of the first head.
        width: Columns of a head.
        num_heads: Heads of all groups.
        group_size: Heads of a group.
        group_step: Columns from the start of a group to the start of the next.

    Example:
        >>> columns = HeadColumns(begin=1, width=1, num_heads=4, group_size=2, group_step=3)
        >>> columns.read(torch.arange(7)[None])
        tensor([[[1],
                 [2],
                 [4],
                 [5]]])
    """

    begin: int
    width: int
    num_heads: int
    group_size: int
    group_step: int

    @property
    def end(self) -> int:
        """Return the column after the last head."""
        last_group = self.num_heads // self.group_size - 1
        return self.begin + last_group * self.group_step + self.group_size * self.width

    def view(self, rows_TC: torch.Tensor) -> torch.Tensor:
        """Return a view of the heads, shape (T, groups, group_size, W)."""
        return rows_TC.as_strided(
            (rows_TC.shape[0], self.num_heads // self.group_size, self.group_size, self.width),
            (rows_TC.stride(0), self.group_step, self.width, 1),
            rows_TC.storage_offset() + self.begin,
        )

    def read(self, rows_TC: torch.Tensor) -> torch.Tensor:
        """Return the heads, shape (T, H, W)."""
        return self.view(rows_TC).reshape(rows_TC.shape[0], self.num_heads, self.width)

    def write(self, rows_TC: torch.Tensor, heads_THW: torch.Tensor) -> None:
        """Overwrite the columns of the heads."""
        view = self.view(rows_TC)
        view.copy_(heads_THW.reshape(view.shape))
