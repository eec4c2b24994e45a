"""Layers with NF4 weights on the meta device, of the attributes that fused layers read, without bitsandbytes."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from lightning_fastft.core.errors import MissingDependencyError
from lightning_fastft.core.extras import pip_line


class QuantState(NamedTuple):
    """Statistics of a weight, as in ``bitsandbytes.functional.QuantState``."""

    absmax: torch.Tensor
    shape: torch.Size | None = None
    code: torch.Tensor | None = None
    blocksize: int | None = None
    quant_type: str | None = None
    dtype: torch.dtype | None = None
    offset: torch.Tensor | None = None
    state2: QuantState | None = None

    @property
    def nested(self) -> bool:
        """Whether the statistics are quantised again."""
        return self.state2 is not None


class Params4bit(nn.Parameter):
    """A packed weight; fused layers know it by the name of this class."""

    quant_state: QuantState

    def __new__(cls, data: torch.Tensor, *, quant_state: QuantState, **_: Any) -> Params4bit:
        """Return a frozen weight with its statistics."""
        weight: Params4bit = torch.Tensor._make_subclass(cls, data, False)  # type: ignore[assignment]
        weight.quant_state = quant_state
        return weight


class Linear4bit(nn.Linear):
    """A linear layer whose weight only fused layers read."""

    def __init__(
        self, in_features: int, out_features: int, bias: bool, *, compute_dtype: torch.dtype, **_: Any
    ) -> None:
        super().__init__(in_features, out_features, bias)
        self.compute_dtype = compute_dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Raise: bitsandbytes computes NF4 layers that are not fused."""
        raise MissingDependencyError(
            "An NF4 layer that is not fused runs kernels of bitsandbytes, also in an estimate. Install it with: "
            f"{pip_line('qlora')}"
        )
