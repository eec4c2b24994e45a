"""DoRA: the factors of the rows of an adapted weight, ``magnitude / norm(W + scale * B A)``, kept for a whole step.

Axes: I input columns, O output columns, R adapter ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners.lora.dora import DoraLinearLayer
from peft.tuners.lora.layer import LoraLayer
from peft.tuners.lora.variants import DoraLinearVariant
from torch import nn

from lightning_fastft.kernels.backends import FLOATING, wide_dtype
from lightning_fastft.kernels.lora_linear.op import wide_product
from lightning_fastft.kernels.nf4_linear.op import dequantise_many, read_params4bit

# An instance attribute of PEFT's DoraLinearLayer, so no state_dict has it.
FACTORS_ATTRIBUTE = "fastft_row_factors"


def is_dora(layer: LoraLayer, name: str) -> bool:
    """Return whether an adapter of a layer is DoRA."""
    return type(layer.lora_variant.get(name)) is DoraLinearVariant


def dora_obstacle(layer: LoraLayer, name: str) -> str:
    """Return why a DoRA adapter of a layer needs PEFT's own forward; empty if it does not."""
    base: Any = layer.get_base_layer()
    magnitude = layer.lora_magnitude_vector[name]
    if type(magnitude) is not DoraLinearLayer or magnitude._forward_hooks or magnitude._forward_pre_hooks:
        return "the magnitude of DoRA has another class than PEFT's, or hooks"
    if getattr(layer, "fan_in_fan_out", False):
        return "DoRA on a transposed weight"
    if any(parameter.requires_grad for parameter in base.parameters()):
        return "DoRA on a layer whose weight or bias is trained"
    weight = getattr(base, "weight", None)
    is_dense = isinstance(base, nn.Linear) and isinstance(weight, nn.Parameter) and weight.dtype in FLOATING
    if not is_dense and (weight is None or read_params4bit(weight) is None):
        return f"DoRA on {type(base).__name__}, whose weight is neither dense nor NF4 in blocks of 64"
    return ""


class RowFactors:
    """The factors of one DoRA layer and what they were computed from.

    Attributes:
        tensor: Shape (2, O), fp32 (float64 for float64): ``magnitude / norm`` and ``1 / norm``. It is written in place,
            so recorded graphs read the present values.
    """

    def __init__(self, layer: LoraLayer, name: str) -> None:
        # Not the layer itself, which patches may replace by another instance with the same parameters.
        self._masters = _masters(layer, name)
        self._weight = layer.get_base_layer().weight
        self._square_O: torch.Tensor | None = None
        self._weight_version = -1
        self._marks: list[Any] = []
        weight, magnitude = self._weight, self._masters[2]
        with torch.inference_mode(mode=False):
            self.tensor = torch.empty(
                2,
                magnitude.shape[0],
                dtype=wide_dtype(magnitude.dtype),
                device=weight.device,  # type: ignore[arg-type]
            )

    def belongs_to(self, layer: LoraLayer, name: str) -> bool:
        """Return whether the parameters are the same objects on the same device as before."""
        masters = _masters(layer, name)
        weight = layer.get_base_layer().weight
        return (
            weight is self._weight
            and weight.device == self.tensor.device
            and all(one is other for one, other in zip(masters, self._masters))
        )

    def is_current(self) -> bool:
        """Return whether version counters, and the addresses of the adapter, are those of the last computation."""
        return self._marks == self._find_marks()

    def make_stale(self) -> None:
        """Compute again at the next ``update``: an optimizer step may have changed no version counter."""
        self._marks = []

    def forget_weight(self) -> None:
        """Read the base weight again too: it was merged, which changes no version counter."""
        self._square_O, self._marks = None, []

    def can_update(self) -> bool:
        """Return whether the base weight is on the device; streamed weights are there in their layer's pass only."""
        return self._weight.device == self.tensor.device

    def update(self, copy_a_RI: torch.Tensor, copy_b_OR: torch.Tensor, scale: float) -> None:
        """Compute the factors in place.

        Cost:
            2 O I R FLOP and one read of the base weight, the first time two; a packed weight is dequantised into
            temporary memory. No host sync.
        """
        with torch.inference_mode(mode=False), torch.no_grad():
            weight_OI = _dense(self._weight, dtype=copy_a_RI.dtype)
            if self._square_O is None or self._weight_version != self._weight._version:
                self._square_O, self._weight_version = row_squares(weight_OI), self._weight._version
            factors = compute_factors(weight_OI, copy_a_RI, copy_b_OR, self._masters[2], scale, square_O=self._square_O)
            self.tensor.copy_(factors)
        self._marks = self._find_marks()

    def _find_marks(self) -> list[Any]:
        masters = [(master._version, master.data_ptr()) for master in self._masters]
        return [*masters, self._weight._version]


def fresh_factors(
    layer: LoraLayer, name: str, copy_a_RI: torch.Tensor, copy_b_OR: torch.Tensor, scale: float
) -> torch.Tensor:
    """Return the factors in new memory, for parameters that are gathered for each pass.

    Cost:
        As the first ``RowFactors.update``.
    """
    with torch.inference_mode(mode=False), torch.no_grad():
        weight_OI = _dense(layer.get_base_layer().weight, dtype=copy_a_RI.dtype)
        magnitude_O = _masters(layer, name)[2]
        return compute_factors(
            weight_OI, copy_a_RI, copy_b_OR, magnitude_O, scale, square_O=row_squares(weight_OI)
        )  # fmt: skip


def row_squares(weight_OI: torch.Tensor) -> torch.Tensor:
    """Return the squared norms of the rows, fp32 (float64 for float64)."""
    return torch.linalg.vector_norm(weight_OI, dim=1, dtype=wide_dtype(weight_OI.dtype)).square()


def compute_factors(
    weight_OI: torch.Tensor,
    a_RI: torch.Tensor,
    b_OR: torch.Tensor,
    magnitude_O: torch.Tensor,
    scale: float,
    *,
    square_O: torch.Tensor,
) -> torch.Tensor:
    """Return ``[magnitude / norm, 1 / norm]`` with the norms of the rows of ``W + scale * B A``.

    The squares are ``|W|^2 + 2 scale (W A^T) . B + scale^2 (B A A^T) . B``, so W + scale B A is never written.
    """
    wide = square_O.dtype
    cross_OR = wide_product(weight_OI, a_RI.T, dtype=wide)
    wide_b_OR = b_OR.to(wide)
    own_RR = wide_product(a_RI, a_RI.T, dtype=wide)
    sums_OR = torch.addmm(cross_OR, wide_b_OR, own_RR, beta=2.0 * scale, alpha=scale * scale)
    # Rounding may leave less than 0 of a row that the adapter cancels.
    norm_O = (square_O + (sums_OR * wide_b_OR).sum(dim=1)).clamp_(min=0.0).sqrt_()
    return torch.stack([magnitude_O.detach().to(wide) / norm_O, 1.0 / norm_O])


def _masters(layer: LoraLayer, name: str) -> list[torch.Tensor]:
    """Return A, B and the magnitude of an adapter."""
    return [layer.lora_A[name].weight, layer.lora_B[name].weight, layer.lora_magnitude_vector[name].weight]


def _dense(weight: torch.Tensor, *, dtype: torch.dtype) -> torch.Tensor:
    """Return a weight as products read it."""
    packed = read_params4bit(weight)
    if packed is None:
        return weight.detach().to(dtype)
    dense = torch.empty(tuple(weight.quant_state.shape), dtype=dtype, device=weight.device)  # type: ignore[attr-defined]
    dequantise_many([packed], outs=[dense], is_checked=False)
    return dense
