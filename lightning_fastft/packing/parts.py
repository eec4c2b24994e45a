"""The part of a pack that one rank of a context-parallel group computes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from lightning_fastft.packing.context import BatchContext


class PackPart(NamedTuple):
    """Which rows of a pack one rank of a context-parallel group computes: one of ``num_parts`` equal, contiguous parts.

    Args:
        whole: The metadata of the whole pack.
        rank: Number of the part, which is the rank in the group.
        num_parts: Number of parts.
        group: Process group of the ranks that hold the parts; None if nothing is exchanged.
    """

    whole: BatchContext
    rank: int
    num_parts: int
    group: Any

    @property
    def rows(self) -> slice:
        """The rows of the part."""
        size = self.whole.num_tokens // self.num_parts
        return slice(self.rank * size, (self.rank + 1) * size)
