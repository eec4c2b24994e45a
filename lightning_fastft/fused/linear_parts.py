"""Read a linear layer for a GEMM: its base weight, dense or in NF4, and its LoRA from PEFT.

Axes: T rows, I input columns, O output columns, R adapter ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeGuard

import torch
from peft.tuners.lora.layer import LoraLayer
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_fastft.activations.host_parameter import is_plain
from lightning_fastft.fused.active_adapters import read_adapter
from lightning_fastft.kernels.fp8_linear.reference import FP8
from lightning_fastft.kernels.nf4_linear.op import read_params4bit
from lightning_fastft.patches.value_points import is_linear_point

# Number of tensors of a layer for autograd: weight, bias, A, B, magnitude.
TENSORS_PER_LAYER = 5


class LinearPart(NamedTuple):
    """A linear layer as one pass reads it.

    Args:
        base: The layer with weight and bias.
        weight: (O, I), or bitsandbytes' packed weight.
        bias: (O,), or None.
        a_RI: Master of A; None without an adapter.
        b_OR: Master of B.
        copy_a_RI: A in the dtype of the rows.
        copy_b_OR: B in the dtype of the rows.
        scale: Factor on the low-rank product.
        num_outputs: O.
        is_packed: The weight is NF4, and frozen.
        magnitude_O: Magnitude of DoRA; None without DoRA.
        factors_2O: Row factors of DoRA, ``magnitude / norm`` and ``1 / norm``, fp32 (float64 for float64).
    """

    base: nn.Module
    weight: torch.Tensor
    bias: torch.Tensor | None
    a_RI: torch.Tensor | None
    b_OR: torch.Tensor | None
    copy_a_RI: torch.Tensor | None
    copy_b_OR: torch.Tensor | None
    scale: float
    num_outputs: int
    is_packed: bool
    magnitude_O: torch.Tensor | None = None
    factors_2O: torch.Tensor | None = None

    @property
    def num_inputs(self) -> int:
        """Number of input columns, I."""
        return int(self.base.in_features)  # type: ignore[arg-type]

    @property
    def rank(self) -> int:
        """Rank of the adapter; 0 without one."""
        return 0 if self.copy_a_RI is None else self.copy_a_RI.shape[0]

    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """Return the tensors for autograd; a packed weight is never trained."""
        return (None if self.is_packed else self.weight, self.bias, self.a_RI, self.b_OR, self.magnitude_O)


def join_biases(parts: Sequence[LinearPart], rows: torch.Tensor) -> torch.Tensor | None:
    """Return the biases of all layers side by side, in the dtype of the rows as in bitsandbytes; 0 for layers without
    one, and None if no layer has one.
    """
    if all(part.bias is None for part in parts):
        return None
    biases = [rows.new_zeros(part.num_outputs) if part.bias is None else part.bias.to(rows.dtype) for part in parts]
    return biases[0] if len(biases) == 1 else torch.cat(biases)


def read_part(
    module: nn.Module, *, dtype: torch.dtype, awaits_copies: bool = False, awaits_gather: bool = False
) -> LinearPart | str:
    """Return a linear layer with its PEFT adapter for a GEMM, or why it cannot be read.

    Supported are ``nn.Linear`` in the dtype of the rows or gathered in e4m3, and bitsandbytes' NF4, with at most one
    active LoRA or DoRA without dropout, which may be merged or disabled. awaits_copies accepts an adapter in fp32,
    because it gets low-precision copies before the first call; awaits_gather accepts sharded weights, because FSDP2
    gathers them before the first call.

    Cost:
        A few microseconds of the host; if an adapter's low-precision copy is stale, that copy; as read_adapter.
    """
    base: nn.Module = module.get_base_layer() if isinstance(module, LoraLayer) else module
    # First, because the row factors of DoRA cannot be computed from a sharded weight.
    obstacle = _base_obstacle(base, dtype=dtype, awaits_gather=awaits_gather)
    if obstacle:
        return obstacle
    linear: Any = base
    num_outputs, is_packed = int(linear.out_features), not _is_dense(linear.weight, awaits_gather=awaits_gather)
    part = LinearPart(linear, linear.weight, linear.bias, None, None, None, None, 0.0, num_outputs, is_packed)
    if not isinstance(module, LoraLayer):
        return part
    found = read_adapter(module, part, dtype=dtype, awaits_gather=awaits_gather)
    if isinstance(found, str) and awaits_copies:
        return read_adapter(module, part, dtype=torch.float32, awaits_gather=awaits_gather)
    return found


def _is_dense(weight: object, *, awaits_gather: bool) -> TypeGuard[torch.Tensor]:
    return is_plain(weight) or (awaits_gather and isinstance(weight, DTensor))


def _base_obstacle(base: nn.Module, *, dtype: torch.dtype, awaits_gather: bool) -> str:
    """Return why a base layer cannot be read, or ""."""
    weight, name = getattr(base, "weight", None), type(base).__name__
    if base._forward_hooks or base._forward_pre_hooks or base._backward_hooks or base._backward_pre_hooks:
        return f"{name} has hooks"
    if "forward" in vars(base):
        return f"{name} has a replaced forward"
    if (
        isinstance(base, nn.Linear)
        and (type(base).forward is nn.Linear.forward or is_linear_point(base))
        and _is_dense(weight, awaits_gather=awaits_gather)
    ):
        # fused/fp8_weights.py computes with frozen weights that FSDP2 gathers in e4m3, or refuses them.
        return "" if weight.dtype in (dtype, FP8) else f"{name} holds {weight.dtype} for rows in {dtype}"
    if type(weight).__name__ != "Params4bit":
        return f"{name} is not a plain linear layer"
    if weight is None or read_params4bit(weight) is None:
        return f"{name} is not NF4 in blocks of 64"
    compute_dtype = getattr(base, "compute_dtype", None)
    is_dtype = compute_dtype in (None, dtype) and weight.quant_state.dtype is dtype  # type: ignore[union-attr]
    is_wide = base.in_features % 64 == 0  # type: ignore[operator]
    return (
        ""
        if is_dtype and is_wide
        else f"{name} computes in {compute_dtype or weight.quant_state.dtype} on {base.in_features} columns"
    )  # type: ignore[union-attr]
