"""The weights of one fp8 product, quantised and held, and the three GEMMs that read them.

Trained weights are held in e4m3 in addition to the parameters, and quantised again after each optimizer step. Their
scales, and those of the rows that they multiply, are powers of 2, so that one quantisation of the output's gradient
serves both the gradient of the input and that of the weight.

Axes: T rows, I input columns, O output columns of all layers that read the same rows, together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lightning_fastft.activations.host_parameter import is_plain
from lightning_fastft.core.patcher import ModelPatcher
from lightning_fastft.core.shards import local_values
from lightning_fastft.fused.fp8_obstacles import adapter_obstacle, product_obstacle, shard_obstacle
from lightning_fastft.fused.linear_parts import LinearPart
from lightning_fastft.kernels.expert_gate.op import gate_backward_quantised
from lightning_fastft.kernels.expert_gate.reference import GateForm
from lightning_fastft.kernels.fp8_linear.op import (
    multiply,
    nf4_row_scales,
    quantise_nf4,
    quantise_rows,
    transpose,
    weight_gradient,
)
from lightning_fastft.kernels.fp8_linear.reference import FP8, Fp8Rows
from lightning_fastft.kernels.launch import contiguous_rows
from lightning_fastft.kernels.nf4_linear.op import read_params4bit
from lightning_fastft.kernels.nf4_linear.reference import NF4Weight

if TYPE_CHECKING:
    from lightning_fastft.fused.fp8_base import Fp8Base


class _Scales(NamedTuple):
    """The scale of each output column, a power of 2: in fp32, and for the gradients in bf16, which is exact."""

    scale_O: torch.Tensor
    factor_O: torch.Tensor


class Fp8Weight:
    """The weights of layers that read the same rows, in e4m3, and their products.

    Biases and adapters are not included.

    Args:
        owner: The ``Fp8Base`` of the model.
    """

    def __init__(self, owner: Fp8Base) -> None:
        self.owner = owner
        # Why the weights do not compute in fp8, empty if they do; None before the first read.
        self.reason: str | None = None
        # The weights whose copies or scales are held, in order.
        self._weights: tuple[torch.Tensor, ...] = ()
        # Identities of the weights at the last read and at each copy.
        self._key: tuple[Any, ...] = ()
        self._forward_key: tuple[Any, ...] | None = None
        self._backward_key: tuple[Any, ...] | None = None
        self._scales: _Scales | None = None
        self._forward: torch.Tensor | None = None
        self._backward: torch.Tensor | None = None
        # Whether FSDP2 gathers the weights in e4m3.
        self.is_sharded = False

    def obstacle(
        self, modules: Sequence[nn.Module], parts: Sequence[LinearPart], *, layer: nn.Module, dtype: torch.dtype
    ) -> str:
        """Return why these layers compute in the dtype of the rows; empty if they compute in fp8.

        Args:
            modules: The modules of the layers in the model, with PEFT's wrappers.
            parts: The layers as read.
            layer: The decoder layer that they belong to.
            dtype: Dtype of the rows.

        Cost:
            A few microseconds of the host.
        """
        if isinstance(layer, FSDPModule) and not self.is_sharded:
            # Why shard left them, or that it was not called.
            return self.reason or "the weights are sharded (FSDP2)"
        reason = self.owner.obstacle(parts[0].weight.device, dtype) or product_obstacle(modules, parts)
        if reason:
            return reason
        # A merge by PEFT does not change version counters; a permanent merge removes PEFT's layers.
        wraps = tuple(isinstance(module, BaseTunerLayer) for module in modules)
        self._key = (*_marks([part.weight for part in parts]), wraps)
        return ""

    def shard(self, modules: Sequence[nn.Module], patcher: ModelPatcher) -> dict[nn.Module, torch.Tensor]:
        """Quantise this rank's shards of frozen weights, and hold the scales of the whole; all ranks call it.

        Returns:
            For each layer without its adapter the values of this rank, shape (rows of a full shard, I); nothing if the
            weights cannot be gathered in e4m3.

        Cost:
            Reads the shards and writes one byte per number; one gather of the scales per weight.
        """
        bases: list[Any] = [each.get_base_layer() if isinstance(each, BaseTunerLayer) else each for each in modules]
        self.reason = adapter_obstacle(modules) or shard_obstacle(bases)
        self.reason = self.reason or self.owner.obstacle(bases[0].weight.device, bases[0].weight.dtype)
        if self.reason:
            return {}
        values, scales = {}, []
        for base in bases:
            weight = base.weight
            rows_OI, num_full = local_values(weight), -(-len(weight) // weight.device_mesh.size(-1))
            values_OI = torch.zeros(num_full, weight.shape[1], dtype=torch.uint8, device=rows_OI.device).view(FP8)
            rows = quantise_rows(
                rows_OI,
                round_scales_to_power_of_2=True,
                out=Fp8Rows(values_OI[: len(rows_OI)], rows_OI.new_empty(len(rows_OI), dtype=torch.float32)),
                backend=self.owner.backend,
                is_checked=False,
            )
            scale = DTensor.from_local(
                rows.scale_T,
                weight.device_mesh,
                weight.placements,
                run_check=False,
                shape=weight.shape[:1],
                stride=(1,),
            )
            values[base] = values_OI
            scales.append(scale.full_tensor())
        self._set_scales(torch.cat(scales), ())
        self.owner.buffer(sum(base.weight.numel() for base in bases), scales[0].device)
        patcher.set_attribute(self, "is_sharded", True)
        return values

    def prepare(self, parts: Sequence[LinearPart]) -> None:
        """Quantise trained weights, and allocate the memory of their transpose."""
        if _are_trained(parts):
            forward_OI, _ = self._read(parts, is_transposed=False)
            self.owner.buffer(forward_OI.numel(), forward_OI.device)

    def refresh(self, *, only_if_written: bool = False) -> None:
        """Quantise weights again in the same memory.

        Args:
            only_if_written: Skip weights whose version counters and addresses are those of the last time. Otherwise
                skip frozen weights.
        """
        weights, marks = self._weights, tuple(_marks(self._weights))
        key = (*marks, *self._key[len(marks) :])
        if not weights or (self._forward_key == key if only_if_written else not weights[0].requires_grad):
            return
        self._key = key
        if not is_plain(weights[0]):
            self._find_scales(weights)
            return
        forward_OI, _ = self._quantise(weights)
        if self._backward is not None:
            self._transpose(forward_OI)

    def quantises(self, parts: Sequence[LinearPart]) -> bool:
        """Return whether the products read quantised rows, which the kernel that computes the rows may write.

        Adapters read the rows themselves.
        """
        return _are_trained(parts) and not any(part.rank for part in parts)

    def quantised_gate_gradients(
        self, parts: Sequence[LinearPart], d_act_TF: torch.Tensor, gate_up_TP: torch.Tensor, form: GateForm
    ) -> tuple[Fp8Rows, Fp8Rows | None]:
        """Return the gradient of gate_up and gated rows as the products read them; costs gate_backward_quantised."""
        return gate_backward_quantised(
            d_act_TF,
            gate_up_TP,
            form=form,
            factor_P=self._read_scales(parts).factor_O,
            round_scales_to_power_of_2=True,
            need_act=True,
            is_checked=False,
        )

    def forward_product(self, parts: Sequence[LinearPart], x_TI: torch.Tensor | Fp8Rows) -> torch.Tensor:
        """Return ``x @ W^T``.

        Cost:
            Reads the rows and writes them in e4m3, unless they are; packed weights cost quantise_nf4. No host sync.
        """
        self.owner.begin()
        weight_OI, scales = self._read(parts, is_transposed=False)
        rows, dtype = self._quantise_input(parts, x_TI)
        return multiply(rows, weight_OI, scales.scale_O, dtype=dtype, backend=self.owner.backend, is_checked=False)

    def quantise_gradient(self, parts: Sequence[LinearPart], d_TO: torch.Tensor) -> Fp8Rows:
        """Return the gradient of the output as the other two products read it, times the scales of the weights.

        Cost:
            Reads the rows and writes them in e4m3. No host sync.
        """
        return quantise_rows(
            contiguous_rows(d_TO),
            factor_I=self._read_scales(parts).factor_O,
            round_scales_to_power_of_2=_are_trained(parts),
            backend=self.owner.backend,
            is_checked=False,
        )

    def backward_product(self, parts: Sequence[LinearPart], d: Fp8Rows, *, dtype: torch.dtype) -> torch.Tensor:
        """Return ``d @ W``.

        Cost:
            Packed weights cost quantise_nf4, trained ones a transpose. No host sync.
        """
        weight_IO, _ = self._read(parts, is_transposed=True)
        return multiply(d, weight_IO, None, dtype=dtype, backend=self.owner.backend, is_checked=False)

    def weight_gradient(self, parts: Sequence[LinearPart], d: Fp8Rows, x_TI: torch.Tensor | Fp8Rows) -> torch.Tensor:
        """Return ``d^T @ x`` of all layers, below each other, from the same e4m3 rows as the forward.

        Cost:
            Reads the rows and writes them in e4m3, unless they are, then weight_gradient. No host sync.
        """
        (rows, dtype), scales = self._quantise_input(parts, x_TI), self._read_scales(parts)
        return weight_gradient(d, rows, scales.scale_O, dtype=dtype, backend=self.owner.backend, is_checked=False)

    def _quantise_input(self, parts: Sequence[LinearPart], x_TI: torch.Tensor | Fp8Rows) -> tuple[Fp8Rows, torch.dtype]:
        """Return rows in e4m3, and the dtype that they had."""
        if isinstance(x_TI, Fp8Rows):
            return x_TI, parts[0].weight.dtype
        rows = quantise_rows(
            contiguous_rows(x_TI),
            round_scales_to_power_of_2=_are_trained(parts),
            backend=self.owner.backend,
            is_checked=False,
        )
        return rows, x_TI.dtype

    def memory(self) -> list[torch.Tensor]:
        """Return the held tensors, whose addresses stay the same until release."""
        return [*(self._scales or ()), *(each for each in (self._forward, self._backward) if each is not None)]

    def release(self) -> None:
        """Free the memory; it is allocated again when needed."""
        self._scales = self._forward = self._backward = self._forward_key = self._backward_key = None
        self._weights = ()

    def __getstate__(self) -> dict[str, Any]:
        """Drop the fp8 weights from a copy or pickle; a copied model quantises its own."""
        return vars(Fp8Weight(self.owner))

    def _read(self, parts: Sequence[LinearPart], *, is_transposed: bool) -> tuple[torch.Tensor, _Scales]:
        """Return the weights, shape (O, I) or (I, O) and valid until the next call, and their scales."""
        # An inference tensor could not be written in a training step.
        with torch.inference_mode(mode=False), torch.no_grad():
            if parts[0].is_packed:
                return self._read_packed(parts, is_transposed=is_transposed)
            if self.is_sharded:
                return self._read_gathered([part.weight for part in parts], is_transposed=is_transposed)
            forward_OI, scales = self._forward, self._scales
            if forward_OI is None or scales is None or self._forward_key != self._key:
                forward_OI, scales = self._quantise([part.weight for part in parts])
            if not is_transposed:
                return forward_OI, scales
            if _are_trained(parts):
                # The weights change with each step, so a copy of their own would save little.
                buffer = self.owner.buffer(forward_OI.numel(), forward_OI.device)
                out_IT = buffer.view(forward_OI.T.shape)
                return transpose(forward_OI, out_IT=out_IT, backend=self.owner.backend, is_checked=False), scales
            if self._backward is None or self._backward_key != self._forward_key:
                return self._transpose(forward_OI), scales
            return self._backward, scales

    def _read_gathered(self, weights: Sequence[torch.Tensor], *, is_transposed: bool) -> tuple[torch.Tensor, _Scales]:
        """Concatenate gathered e4m3 weights, or their transposes, in the buffer that all layers share."""
        assert self._scales is not None
        if len(weights) == 1 and not is_transposed:
            return weights[0].detach(), self._scales
        sizes, num_inputs = [len(weight) for weight in weights], weights[0].shape[1]
        buffer = self.owner.buffer(sum(sizes) * num_inputs, weights[0].device)
        if not is_transposed:
            values_OI = buffer.view(-1, num_inputs)
            torch.cat([weight.detach().view(torch.uint8) for weight in weights], out=values_OI.view(torch.uint8))
            return values_OI, self._scales
        values_IO = buffer.view(num_inputs, -1)
        for weight, out_IO in zip(weights, values_IO.split(sizes, dim=1)):
            transpose(weight.detach(), out_IT=out_IO, backend=self.owner.backend, is_checked=False)
        return values_IO, self._scales

    def _transpose(self, forward_OI: torch.Tensor) -> torch.Tensor:
        """Write the transpose of frozen dense weights, in the held memory if it fits."""
        with torch.inference_mode(mode=False), torch.no_grad():
            out_IT = self._backward = _memory(self._backward, forward_OI.T.shape, forward_OI.device)
            self._backward_key = self._forward_key
            return transpose(forward_OI, out_IT=out_IT, backend=self.owner.backend, is_checked=False)

    def _quantise(self, weights: Sequence[torch.Tensor]) -> tuple[torch.Tensor, _Scales]:
        """Write dense weights in e4m3 and their scales, in the held memory if it fits."""
        with torch.inference_mode(mode=False), torch.no_grad():
            sizes, device = [len(weight) for weight in weights], weights[0].device
            forward_OI = self._forward = _memory(self._forward, (sum(sizes), weights[0].shape[1]), device)
            scale_O = torch.empty(sum(sizes), dtype=torch.float32, device=device)
            for weight, values_OI, scales_O in zip(weights, forward_OI.split(sizes), scale_O.split(sizes)):
                quantise_rows(
                    contiguous_rows(weight),
                    round_scales_to_power_of_2=True,
                    out=Fp8Rows(values_OI, scales_O),
                    backend=self.owner.backend,
                    is_checked=False,
                )
            return forward_OI, self._set_scales(scale_O, weights)

    def _read_scales(self, parts: Sequence[LinearPart]) -> _Scales:
        """Return the scales of the weights."""
        if self._scales is not None and (self.is_sharded or self._forward_key == self._key):
            return self._scales
        return self._read(parts, is_transposed=False)[1]

    def _read_packed(self, parts: Sequence[LinearPart], *, is_transposed: bool) -> tuple[torch.Tensor, _Scales]:
        """Convert NF4 weights into the buffer that all layers share."""
        num_inputs = int(parts[0].base.in_features)  # type: ignore[arg-type]
        sizes = [part.num_outputs for part in parts]
        device, num_outputs = parts[0].weight.device, sum(sizes)
        weights = [part.weight for part in parts]
        scales = self._scales
        if scales is None or self._forward_key != self._key:
            scales = self._find_scales(weights)
        shape = (num_inputs, num_outputs) if is_transposed else (num_outputs, num_inputs)
        values = self.owner.buffer(num_inputs * num_outputs, device).view(shape)
        quantise_nf4(
            _read_nf4(weights),
            values=values.split(sizes, dim=1 if is_transposed else 0),
            scales=scales.scale_O.split(sizes),
            is_transposed=is_transposed,
            backend=self.owner.backend,
            is_checked=False,
        )
        return values, scales

    def _find_scales(self, weights: Sequence[torch.Tensor]) -> _Scales:
        """Compute the scales of NF4 weights."""
        with torch.inference_mode(mode=False), torch.no_grad():
            found = _read_nf4(weights)
            sizes = [weight.quant_state.shape[0] for weight in weights]  # type: ignore[attr-defined]
            scale_O = torch.empty(sum(sizes), dtype=torch.float32, device=weights[0].device)
            nf4_row_scales(found, scales=scale_O.split(sizes), backend=self.owner.backend)
            return self._set_scales(scale_O, weights)

    def _set_scales(self, scale_O: torch.Tensor, weights: Sequence[torch.Tensor]) -> _Scales:
        """Hold the scales of the present weights."""
        held = self._scales or (None, None)
        self._scales = _Scales(_put(held[0], scale_O), _put(held[1], scale_O.to(torch.bfloat16)))
        self._forward_key, self._weights = self._key, tuple(weights)
        return self._scales


def _read_nf4(weights: Sequence[torch.Tensor]) -> list[NF4Weight]:
    return [found for found in map(read_params4bit, weights) if found is not None]


def _marks(weights: Sequence[torch.Tensor]) -> list[tuple[Any, ...]]:
    """Return a key that changes when the weights are not those that were quantised."""
    return [(weight.data_ptr(), weight._version, weight.device) for weight in weights]


def _are_trained(parts: Sequence[LinearPart]) -> bool:
    return parts[0].weight.requires_grad


def _memory(held: torch.Tensor | None, shape: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return the held memory for e4m3 if it fits, because recorded graphs may read it, else new memory."""
    if held is not None and held.shape == torch.Size(shape) and held.device == device:
        return held
    return torch.empty(shape, dtype=FP8, device=device)


def _put(held: torch.Tensor | None, new: torch.Tensor) -> torch.Tensor:
    """Return new, copied into the held memory if it fits, because recorded graphs may read that memory."""
    return new if held is None or held.shape != new.shape or held.device != new.device else held.copy_(new)
