"""Frozen weights of a stack of layers: their sizes, and their move to the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import NamedTuple

from torch import nn

from lightning_fastft.activations.streams import CopyStreams
from lightning_fastft.core.errors import OptionError
from lightning_fastft.core.status import Status
from lightning_fastft.planner.step import EndBytes


class StreamedWeights(NamedTuple):
    """Frozen weights that were moved to the host.

    Args:
        num_host_bytes: Their size on the host.
        num_slot_bytes: Size of their device slots.
        ends: Sizes of the input embedding and the output layer, if they moved too.
        statuses: Statuses for the user.
        enter_backward: Copies the first layer in for the backward; None if not needed.
        prefetch_head: Starts the copy of the next of this many parts of the output layer; None if it did not move.
        drop_head: Frees such a copy if no head took it.
    """

    num_host_bytes: int
    num_slot_bytes: int
    ends: EndBytes = EndBytes()
    statuses: tuple[Status, ...] = ()
    enter_backward: Callable[[], None] | None = None
    prefetch_head: Callable[[int], None] | None = None
    drop_head: Callable[[], None] | None = None


class GatheredWeights(NamedTuple):
    """Units of weights that are sharded over ranks, and gathered for each use unless they stay gathered.

    Args:
        unit_bytes: Returns the device memory of each unit while it is gathered, in addition to its shard.
        num_frozen: How many units are frozen; they come first, and stay gathered for good. Trained ones stay gathered
            from a forward to its backward.
        keep: Keeps the first units gathered from their next use on, given their number; equal on all ranks.
        agree: Returns the minimum of a number over all ranks, a collective.
    """

    unit_bytes: Callable[[], tuple[int, ...]]
    num_frozen: int
    keep: Callable[[int], None]
    agree: Callable[[int], int]

    def num_within(self, num_bytes: int) -> int:
        """Return how many units fit in this memory.

        Example:
            >>> GatheredWeights(lambda: (4, 2, 2), num_frozen=3, keep=print, agree=int).num_within(6)
            2
        """
        return sum(total <= num_bytes for total in accumulate(self.unit_bytes()))

    def keep_all(self) -> tuple[Callable[[], str], int]:
        """Keep every unit gathered; return a function that describes them, and the memory of trained ones."""
        num_units = len(self.unit_bytes())
        self.keep(num_units)
        return partial(self.describe, num_units), self.trained_bytes(num_units)

    def trained_bytes(self, num_kept: int) -> int:
        """Return the memory of trained units among the first ones, which is in use in steps only."""
        return sum(self.unit_bytes()[self.num_frozen : num_kept])

    def describe(self, num_kept: int) -> str:
        """Return as a clause how many units stay gathered, and their memory in addition to their shards.

        Example:
            >>> GatheredWeights(lambda: (2**30, 2**29), num_frozen=1, keep=print, agree=int).describe(2)
            '2 of 2 units of sharded weights stay gathered (1.5 GiB), 1 trained one from forward to backward'
        """
        unit_bytes = self.unit_bytes()
        gib, num_trained = sum(unit_bytes[:num_kept]) / 2**30, max(0, num_kept - self.num_frozen)
        trained = (
            f", {num_trained} trained one{'s' * (num_trained > 1)} from forward to backward" if num_trained else ""
        )
        return f"{num_kept} of {len(unit_bytes)} units of sharded weights stay gathered ({gib:.1f} GiB){trained}"


class FrozenWeights:
    """Measure the frozen weights of layers, and move them to the host at most once.

    Args:
        layers: Decoder layers, in order.
        move: Moves their weights and the ends of the model to the host; None if they cannot move.
        resident_ends: Returns the sizes of the ends that would move with them.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        *,
        move: Callable[[CopyStreams], StreamedWeights] | None = None,
        resident_ends: Callable[[], EndBytes] = EndBytes,
    ) -> None:
        self.layer_bytes = [frozen_bytes(layer) for layer in layers]
        self.streamed: StreamedWeights | None = None
        self.move = move
        self._resident_ends = resident_ends

    @property
    def can_move(self) -> bool:
        """Whether there are frozen weights on the device that can move to the host."""
        return self.move is not None and self.streamed is None and sum(self.layer_bytes) > 0

    @property
    def ends(self) -> EndBytes:
        """Sizes of the ends of the model that move, or have moved, with the layers."""
        return self._resident_ends() if self.streamed is None else self.streamed.ends

    @property
    def statuses(self) -> tuple[Status, ...]:
        """Statuses of the moved weights, for the user."""
        return () if self.streamed is None else self.streamed.statuses

    @property
    def host_bytes(self) -> int:
        """Pinned memory that the moved weights use, which every plan needs."""
        if self.streamed is None:
            return 0
        # The plan counts whole layers, but a few small tensors of them stay on the device.
        return max(self.streamed.num_host_bytes, sum(self.layer_bytes)) + self.streamed.ends.total

    @property
    def absent_bytes(self) -> int:
        """Device memory that moved weights do not use; a plan counts them as resident and subtracts them itself."""
        if self.streamed is None:
            return 0
        return sum(self.layer_bytes) - self.streamed.num_slot_bytes + self.streamed.ends.total

    def stream(self, streams: CopyStreams) -> StreamedWeights:
        """Move the weights to the host.

        Raises:
            OptionError: The weights of these layers cannot be streamed, or none is frozen.
            HostMemoryError: They do not fit in host memory.
            UnsupportedModelError: A weight of the model cannot be streamed.
        """
        if self.move is None:
            raise OptionError(
                "weights='stream' supports transformers models only; for other layers use "
                "lightning_fastft.activations.weights.WeightStreamer."
            )
        self.streamed = self.move(streams)
        return self.streamed


def frozen_bytes(layer: nn.Module) -> int:
    """Return the size of the weights of a layer that can be streamed: frozen and not sharded."""
    return sum(
        # NF4 numel() is the logical size; use held_bytes for memory.
        getattr(parameter, "held_bytes", parameter.nbytes)
        for parameter in layer.parameters()
        if not parameter.requires_grad and not hasattr(parameter, "device_mesh")
    )
