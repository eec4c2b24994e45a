"""DoRA: the factors of the rows of an adapted weight, ``magnitude / norm(W + scale * B A)``, kept for a whole step.

Axes: I input columns, O output columns, R adapter ranks.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from peft.tuners.lora.dora import DoraLinearLayer
from peft.tuners.lora.layer import LoraLayer
from peft.tuners.lora.variants import DoraLinearVariant
from torch import nn

from lightning_fastft.kernels.backends import FLOATING, wide_dtype
from lightning_fastft.kernels.column_scale.op import row_factors
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


def variant_obstacle(layer: LoraLayer, name: str) -> str:
    """Return why an adapter is neither LoRA nor a supported DoRA; empty if it is one of them."""
    if layer.lora_bias.get(name, False):
        return "the adapter has a bias"
    if name not in layer.lora_variant:
        return ""
    if not is_dora(layer, name):
        return f"the adapter is a variant of LoRA ({type(layer.lora_variant[name]).__name__})"
    if draws(layer, name, is_training=True):
        return "DoRA with dropout"
    return dora_obstacle(layer, name)


def draws(layer: LoraLayer, name: str, *, is_training: bool) -> bool:
    """Return whether the dropout of an adapter draws."""
    dropout = layer.lora_dropout[name]
    return is_training and not isinstance(dropout, nn.Identity) and getattr(dropout, "p", 1.0) > 0.0


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
        weight = layer.get_base_layer()._parameters["weight"]
        return (
            weight is self._weight
            and weight.device == self.tensor.device
            and all(map(operator.is_, _masters(layer, name), self._masters))
        )

    def is_current(self) -> bool:
        """Return whether version counters, and the addresses of the adapter, are those of the last computation."""
        return self._marks == self._find_marks()

    def make_stale(self) -> None:
        """Compute again at the next read: an optimizer step or a merge may have changed no version counter."""
        self._marks = []

    def update(self, copy_a_RI: torch.Tensor, copy_b_OR: torch.Tensor, scale: float) -> None:
        """Compute the factors in place.

        Cost:
            That of the kernel row_factors; a packed weight is dequantised into temporary memory. No host sync.
        """
        _write(self._weight, copy_a_RI, copy_b_OR, self._masters[2], scale=scale, out=self.tensor)
        self._marks = self._find_marks()

    def _find_marks(self) -> list[Any]:
        masters = [(master._version, master.data_ptr()) for master in self._masters]
        return [*masters, self._weight._version]


def factors_of(layer: LoraLayer) -> dict[str, RowFactors]:
    """Return the row factors that a layer holds now, by adapter."""
    modules: Any = layer._modules["lora_magnitude_vector"]
    held = {name: vars(module).get(FACTORS_ATTRIBUTE) for name, module in modules._modules.items()}
    return {name: factors for name, factors in held.items() if factors is not None}


def forget_merged(layer: LoraLayer) -> None:
    """Drop what was computed from the base weight of a layer that is merged at present."""
    if layer.merged:
        for factors in factors_of(layer).values():
            factors.make_stale()


def fresh_factors(layer: LoraLayer, name: str, copy_a_RI: torch.Tensor, copy_b_OR: torch.Tensor) -> torch.Tensor:
    """Return the factors in new memory, for parameters that are gathered for each pass.

    Cost:
        As ``RowFactors.update``.
    """
    magnitude_O, scale = _masters(layer, name)[2].detach(), float(layer.scaling[name])
    out = magnitude_O.new_empty(2, len(magnitude_O), dtype=wide_dtype(copy_a_RI.dtype))
    return _write(layer.get_base_layer().weight, copy_a_RI, copy_b_OR, magnitude_O, scale=scale, out=out)


def _write(
    weight: Any,
    copy_a_RI: torch.Tensor,
    copy_b_OR: torch.Tensor,
    magnitude_O: torch.Tensor,
    *,
    scale: float,
    out: torch.Tensor,
) -> torch.Tensor:
    """Write the factors of a weight, dense or packed."""
    with torch.inference_mode(mode=False), torch.no_grad():
        weight_OI = _dense(weight, dtype=copy_a_RI.dtype)
        return row_factors(
            weight_OI, copy_a_RI, copy_b_OR, magnitude_O.detach(), scale=scale, out=out, is_checked=False
        )


def _masters(layer: LoraLayer, name: str) -> list[torch.Tensor]:
    """Return A, B and the magnitude of an adapter."""
    # Not as attributes, which take a microsecond each in modules.
    kinds: list[Any] = [layer._modules[kind] for kind in ("lora_A", "lora_B", "lora_magnitude_vector")]
    return [kind._modules[name]._parameters["weight"] for kind in kinds]


def _dense(weight: torch.Tensor, *, dtype: torch.dtype) -> torch.Tensor:
    """Return a weight as products read it."""
    packed = read_params4bit(weight)
    if packed is None:
        return weight.detach().to(dtype)
    dense = torch.empty(tuple(weight.quant_state.shape), dtype=dtype, device=weight.device)  # type: ignore[attr-defined]
    dequantise_many([packed], outs=[dense], is_checked=False)
    return dense
