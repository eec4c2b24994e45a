"""What this rank holds of sharded tensors."""

from __future__ import annotations

import torch


def local_values(tensor: torch.Tensor) -> torch.Tensor:
    """Return the shard of a DTensor that this rank holds, without autograd; other tensors as they are.

    The same object at each call: ``to_local`` makes a new view wherever autograd is on.

    Example:
        >>> whole = torch.ones(2)
        >>> local_values(whole) is whole
        True
    """
    if type(tensor) in (torch.Tensor, torch.nn.Parameter):
        return tensor
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return local
