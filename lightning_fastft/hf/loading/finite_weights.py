"""Refuse weights that hold NaN or infinity."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from lightning_fastft.core.errors import DataError, list_names

_PART_SIZE = 2**24


def check_finite(model: nn.Module, *, name: str) -> None:
    """Refuse weights that hold NaN or infinity.

    Quantised weights are checked by their scales, which show infinity but, on CUDA, no NaN. So
    ``hf/expert_nf4_reading.py`` measures the weights of a checkpoint before it quantises them.

    Raises:
        DataError: A weight is not finite; the message names the tensors.

    Cost:
        One reduction over all weights on their device and one host sync.
    """
    names, tensors = [], []
    for parameter_name, parameter in model.named_parameters():
        for tensor in _judged_tensors(parameter):
            if tensor.is_floating_point() and tensor.numel() and tensor.device.type != "meta":
                names.append(parameter_name)
                tensors.append(tensor.detach())
    # The largest magnitude propagates NaN and infinity, and needs no copy of the weights.
    refuse_not_finite(names, [largest_magnitude(tensor) for tensor in tensors], name=name)


def largest_magnitude(tensor: torch.Tensor) -> torch.Tensor:
    """Return the largest magnitude, fp32; it propagates NaN and infinity."""
    # A CPU copies what it reduces to fp32.
    parts = tensor.reshape(-1).split(_PART_SIZE) if tensor.device.type == "cpu" else (tensor,)
    found = [torch.linalg.vector_norm(part, ord=float("inf"), dtype=torch.float32) for part in parts]
    return torch.stack(found).amax()


def refuse_not_finite(names: list[str], largest: list[torch.Tensor], *, name: str) -> None:
    """Raise DataError for the tensors whose largest magnitude is not finite; one host sync."""
    if not largest:
        return
    is_finite = torch.isfinite(torch.stack(largest)).tolist()
    broken = list(dict.fromkeys(tensor_name for tensor_name, finite in zip(names, is_finite) if not finite))
    if broken:
        raise DataError(
            f"Weights of {name} hold NaN or infinity in {list_names(broken)}. Fetch the files again or check the "
            "checkpoint."
        )


def _judged_tensors(parameter: nn.Parameter) -> Iterator[torch.Tensor]:
    """Yield the tensors that show whether a weight is finite: the weight, or the scales of a quantised one."""
    quant_state, stack = getattr(parameter, "quant_state", None), getattr(parameter, "stack", None)
    if stack is not None:
        yield from (stack.nested_absmax_EG, stack.offset_E)
        return
    if quant_state is None:
        yield parameter
        return
    nested = quant_state.state2
    yield quant_state.absmax if nested is None else nested.absmax
    if nested is not None:
        yield quant_state.offset.reshape(1)
