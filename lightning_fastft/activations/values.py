"""Find the segment of a decoder layer, or of a module inside it, which may hold its output."""

from __future__ import annotations

import torch
from torch import nn

from lightning_fastft.activations.segments import Segment, Session

# Instance attributes: the segment of a decoder layer or a module, and the module's name inside the layer.
SEGMENT_ATTRIBUTE = "fastft_segment"
NAME_ATTRIBUTE = "fastft_value_name"
ATTENTION_VALUE = "attention"


def find_segment(module: nn.Module) -> Segment | None:
    """Return the segment of a decoder layer or of a module inside it; None without a policy."""
    segment: Segment | None = vars(module).get(SEGMENT_ATTRIBUTE)
    return segment


def find_session(module: nn.Module) -> Session | None:
    """Return the open session of a module's segment; None outside of a session and while torch.compile traces."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return None
    segment = find_segment(module)
    if segment is None or segment.session is not None or not module.training:
        return None if segment is None else segment.session
    return segment.inner_session()


def value_name(module: nn.Module) -> str:
    """Return the name of a point inside its decoder layer."""
    return str(vars(module)[NAME_ATTRIBUTE])


def unneeded(x: torch.Tensor, width: int) -> torch.Tensor:
    """Return a placeholder for an output that is never read: NaN of shape (..., width), one element of memory."""
    return x.new_full((1,), float("nan")).expand(*x.shape[:-1], width)
