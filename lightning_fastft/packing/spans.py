"""Spans of a pack whose tokens see each other in both directions: images, in some model families.

Axes: T tokens of the pack.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from lightning_fastft.core.errors import ShapeError


class BidirectionalSpans(NamedTuple):
    """Spans whose tokens also see the later tokens of their span, besides what causal attention shows them.

    Args:
        ranges: First row of each span and one past its last, ascending; each span is in one document.
        in_windows_only: Whether only layers with a sliding window have them, and the others are causal.
        last_T: The last row that each token sees in those layers, int64.
    """

    ranges: tuple[tuple[int, int], ...]
    in_windows_only: bool
    last_T: torch.Tensor

    @classmethod
    def build(
        cls, ranges: Sequence[tuple[int, int]], *, in_windows_only: bool, document_T: torch.Tensor
    ) -> BidirectionalSpans:
        """Return the spans of a pack.

        Args:
            ranges: As the attribute.
            in_windows_only: As the attribute.
            document_T: Document of each token, on the CPU.

        Raises:
            ShapeError: A span is empty, overlaps the one before, or leaves its document.

        Example:
            >>> document_T = torch.tensor([0, 0, 0, 1])
            >>> BidirectionalSpans.build([(1, 3)], in_windows_only=False, document_T=document_T).last_T.tolist()
            [0, 2, 2, 3]
        """
        last_T = torch.arange(document_T.numel())
        free = 0
        for begin, end in ranges:
            if not free <= begin < end <= document_T.numel() or document_T[begin] != document_T[end - 1]:
                raise ShapeError(
                    f"The span of rows {begin} to {end} is empty, overlaps another one, or leaves its document."
                )
            last_T[begin:end] = end - 1
            free = end
        return cls(tuple(ranges), in_windows_only, last_T)

    def apply_to(self, window: int | None) -> bool:
        """Return whether a layer with this sliding window, or with none, has the spans."""
        return window is not None or not self.in_windows_only

    def end_of_keys(self, num_rows: int) -> int:
        """Return one past the last key that the first so many rows of the pack see."""
        return next((end for begin, end in self.ranges if begin < num_rows < end), num_rows)

    def map(self, move: Callable[[torch.Tensor], torch.Tensor]) -> BidirectionalSpans:
        """Return the spans with a moved tensor."""
        return self._replace(last_T=move(self.last_T))
