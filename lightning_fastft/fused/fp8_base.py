"""Compute the GEMMs of base weights of fused decoder layers in fp8, frozen or trained; all else is unchanged.

``fp8_weights`` has the weights of one product.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from lightning_fastft.core.errors import UnsupportedModelError
from lightning_fastft.core.patcher import ModelPatcher
from lightning_fastft.core.status import Status, summarize_obstacles
from lightning_fastft.fused.fp8_weights import Fp8Weight
from lightning_fastft.fused.linears import FusedLinear
from lightning_fastft.hf.sharding.stand_ins import gather_instead, num_local_bytes
from lightning_fastft.kernels.backends import TRITON_DTYPES
from lightning_fastft.kernels.fp8_linear.op import find_obstacle
from lightning_fastft.kernels.fp8_linear.reference import FP8
from lightning_fastft.moe.fp8_experts import refresh_written as refresh_experts

STATUS_NAME = "fp8 products"
# An instance attribute, so no state_dict has it.
FP8_ATTRIBUTE = "fastft_fp8_base"
# q, k and v; output; gate and up; down.
NUM_PRODUCTS = 4


def in_fp8(
    fused_linear: FusedLinear, modules: Sequence[nn.Module], *, layer: nn.Module, place: int, dtype: torch.dtype
) -> FusedLinear | str:
    """Return the FusedLinear with fp8 weights if the layer has them and supports them, else unchanged, or why it cannot
    compute at all.

    Args:
        fused_linear: Linear layers that read the same rows.
        modules: The modules of these layers in the model, with PEFT's wrappers.
        layer: The decoder layer that they belong to.
        place: Index of the product in the decoder layer.
        dtype: Dtype of the rows.

    Cost:
        A few microseconds of the host.
    """
    weights: tuple[Fp8Weight, ...] | None = vars(layer).get(FP8_ATTRIBUTE)
    has_own_dtype = all(part.weight.dtype is not FP8 for part in fused_linear.parts)
    if weights is None:
        return fused_linear if has_own_dtype else f"weights are in {FP8}"
    weight = weights[place]
    weight.reason = weight.obstacle(modules, fused_linear.parts, layer=layer, dtype=dtype)
    if not weight.reason:
        return dataclasses.replace(fused_linear, base=weight)
    return fused_linear if has_own_dtype else weight.reason


def refuse_own_forward(layer: nn.Module) -> None:
    """Refuse to run the forward of a layer's own class on weights that FSDP2 gathers in e4m3.

    Raises:
        UnsupportedModelError: The layer has such weights.

    Cost:
        A few microseconds of the host.
    """
    if any(weight.is_sharded for weight in vars(layer).get(FP8_ATTRIBUTE, ())):
        raise UnsupportedModelError(
            f"A call of {type(layer).__name__} needs its weights in the dtype of the model (a cache, autocast, merged "
            "adapters, or an option that its fused form does not have), and FSDP2 gathers them in e4m3 until the run "
            "ends. Make the call after the run, or set FusedKernels(base_compute='model_dtype')."
        )


def refresh_written(layer: nn.Module) -> None:
    """Quantise the weights of a layer again if they were written; recorded graphs do not check this.

    Cost:
        A few microseconds of the host.
    """
    for weight in vars(layer).get(FP8_ATTRIBUTE, ()):
        weight.refresh(only_if_written=True)
    refresh_experts(layer)


class Fp8Base:
    """The fp8 weights of one model.

    Args:
        layers: Fused decoder layers.
        read: Returns the products of a layer, as a call reads them.
        find: Returns the linear layers of each product of a layer, with PEFT's wrappers.
        is_emulated: Compute with the reference, in plain PyTorch on any device.

    Cost:
        Packed weights share one buffer with a byte for each weight of the largest product. Frozen dense weights are
        quantised once, at their first product: one byte per weight, and another one for the transpose at the first
        backward. Trained weights are quantised after each optimizer step: one byte per weight; their transpose is
        written into the shared buffer at each use. The original weights stay, for the optimizer, files, merging and
        generation. Scales take six bytes per output column. Products that do not compute in fp8 use no memory. Frozen
        dense weights that FSDP2 shards: see shard.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        *,
        read: Callable[[nn.Module], Sequence[FusedLinear | None] | str],
        find: Callable[[nn.Module], Sequence[Sequence[nn.Module]]],
        is_emulated: bool,
    ) -> None:
        self.is_emulated = is_emulated
        # Backend of the kernels.
        self.backend = "reference" if is_emulated else "auto"
        self._layers = list(layers)
        self._read, self._find = read, find
        self._sharded_note = ""
        self._buffers: dict[torch.device, torch.Tensor] = {}
        self._seen: Status | None = None

    def install(self, patcher: ModelPatcher) -> None:
        """Make the layers compute in fp8 until the patcher is undone."""
        for layer in self._layers:
            patcher.set_attribute(layer, FP8_ATTRIBUTE, tuple(Fp8Weight(self) for _ in range(NUM_PRODUCTS)))
        patcher.add_undo(self.close)

    def close(self) -> None:
        """Free the memory."""
        self._seen = self.status()
        self._buffers.clear()
        for layer in self._layers:
            for weight in vars(layer).get(FP8_ATTRIBUTE, ()):
                weight.release()

    def prepare(self) -> None:
        """Quantise trained weights before the first step, so that a plan of activations counts their memory.

        Cost:
            As refresh.
        """
        for layer in self._layers:
            found = self._read(layer)
            for fused_linear in () if isinstance(found, str) else found:
                if fused_linear is not None and isinstance(fused_linear.base, Fp8Weight):
                    fused_linear.base.prepare(fused_linear.parts)

    def shard(self, patcher: ModelPatcher, *, host_bytes: int) -> None:
        """Quantise the frozen dense weights that FSDP2 shards, which then gathers them in e4m3, until the patcher is
        undone; call it on all ranks, when the weights are loaded and before a forward. A second call does nothing.

        Rows have their own scales, so each rank quantises its shard as one device would quantise the whole.

        Args:
            patcher: Undoes it.
            host_bytes: Memory of the host for the shards in the dtype of the model; those that do not fit stay on
                the device.

        Cost:
            Device memory per rank: one byte for each weight of its shards, instead of those in the dtype of the model;
            while a layer is gathered, one byte per weight, and a buffer with a byte for each weight of the largest
            product, in which layers that read the same rows are concatenated and weights are transposed. One gather of
            the scales per weight, and a copy of the shards to the host and back.
        """
        num_parked = num_kept = 0
        # An inference tensor could not be read in a training step.
        with torch.inference_mode(mode=False), torch.no_grad():
            for layer in self._layers:
                weights: tuple[Fp8Weight, ...] = vars(layer)[FP8_ATTRIBUTE]
                if not isinstance(layer, FSDPModule) or any(weight.is_sharded for weight in weights):
                    continue
                values: dict[nn.Module, torch.Tensor] = {}
                layer.reshard()
                for weight, modules in zip(weights, self._find(layer)):
                    values |= weight.shard(modules, patcher)
                num_bytes = sum(num_local_bytes(module) for module in values)
                fits = num_parked + num_bytes <= host_bytes
                num_parked, num_kept = num_parked + fits * num_bytes, num_kept + (not fits) * num_bytes
                if values:
                    gather_instead(layer, values, patcher, parks_weights=fits)
        if num_parked and torch.cuda.is_initialized():
            # A plan of activations counts what the allocator keeps.
            torch.cuda.empty_cache()
        if num_parked or num_kept:
            gib = " and ".join(
                f"{num_bytes / 2**30:.1f} GiB {place}"
                for num_bytes, place in ((num_parked, "on the host"), (num_kept, "on the device"))
                if num_bytes
            )
            self._sharded_note = f", gathered in e4m3; their shards in the dtype of the model: {gib}"

    def refresh(self) -> None:
        """Quantise all trained weights that were quantised before; call it after each optimizer step.

        Some optimizers change no version counter, and recorded graphs read the present e4m3 weights.

        Cost:
            Reads trained weights and writes one byte each; one launch per weight and no host sync.
        """
        for layer in self._layers:
            for weight in vars(layer).get(FP8_ATTRIBUTE, ()):
                weight.refresh()

    def begin(self) -> None:
        """Record which products compute in fp8, at the first product, because the model may move after the run."""
        if self._seen is None:
            self._seen = self.status()

    def status(self) -> Status:
        """Return how many products compute in fp8, and why others do not.

        The counts are those of the first product or, before it, of the present state.
        """
        if self._seen is not None:
            return self._seen
        reasons: Counter[str] = Counter()
        for layer in self._layers:
            weights = vars(layer)[FP8_ATTRIBUTE]
            # A sharded layer cannot be read.
            found = "" if isinstance(layer, FSDPModule) else self._read(layer)
            reasons.update(
                [found]
                if isinstance(found, str) and found
                else [weight.reason for weight in weights if weight.reason is not None]
            )
        emulated = ", in plain PyTorch" if self.is_emulated else ""
        counts = f"products of {len(self._layers)} layers in e4m3{emulated}{self._sharded_note}"
        return summarize_obstacles(
            STATUS_NAME, reasons, counts=counts, otherwise="products run in the dtype of the model"
        )

    def obstacle(self, device: torch.device, dtype: torch.dtype) -> str:
        """Return why products for rows of this dtype cannot compute in fp8 on a device; empty if they can."""
        if self.is_emulated:
            return "" if dtype in TRITON_DTYPES else f"rows are in {dtype}"
        return find_obstacle(device) or (
            "" if dtype is torch.bfloat16 else f"fp8 products return bf16, and rows are in {dtype}"
        )

    def buffer(self, num_values: int, device: torch.device) -> torch.Tensor:
        """Return memory for weights in e4m3, valid until the next call."""
        found = self._buffers.get(device)
        if found is None or found.numel() < num_values:
            # An inference tensor could not be written in a training step.
            with torch.inference_mode(mode=False):
                found = self._buffers[device] = torch.empty(num_values, dtype=FP8, device=device)
        return found[:num_values]

    def memory(self) -> list[torch.Tensor]:
        """Return the present buffers; a buffer that is too small is replaced by a larger one."""
        return list(self._buffers.values())

    def __getstate__(self) -> dict[str, Any]:
        """Drop the buffers from a copy or pickle; a copied model allocates its own."""
        return {**vars(self), "_buffers": {}}
