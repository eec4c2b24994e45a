"""LoRA adapters with fp32 masters that compute in low precision, with PEFT's names, files and methods unchanged."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from peft.tuners.lora.layer import Linear as PeftLinear
from peft.tuners.lora.layer import LoraLayer
from peft.tuners.lora.layer import ParamWrapper as PeftParamWrapper
from torch import nn

from lightning_fastft.activations.values import find_session, unneeded, value_name
from lightning_fastft.activations.weights import STREAMED_ATTRIBUTE
from lightning_fastft.core.autocast import is_autocast_on
from lightning_fastft.core.errors import OptionError
from lightning_fastft.core.patcher import ModelPatcher, share_state
from lightning_fastft.core.status import Status
from lightning_fastft.fused.row_factors import (
    FACTORS_ATTRIBUTE,
    RowFactors,
    factors_of,
    forget_merged,
    fresh_factors,
    is_dora,
    variant_obstacle,
)
from lightning_fastft.kernels.column_scale.op import scale_by_magnitude
from lightning_fastft.kernels.lora_linear.op import lora_addmm
from lightning_fastft.moe.adapters import COPIES_ATTRIBUTE
from lightning_fastft.moe.adapters import ParamWrapper as RoutedWrapper
from lightning_fastft.moe.low_precision_copy import LowPrecisionCopy
from lightning_fastft.patches.value_points import is_frozen_point

STATUS_NAME = "low-precision adapters"
# Instance attributes, neither parameters nor buffers, so no state_dict has them.
LAYER_ATTRIBUTE = "fastft_low_precision_adapters"
WEIGHT_ATTRIBUTE = "fastft_copy"


class LowPrecisionAdapters:
    """Hold the low-precision copies of a model's LoRA weights and keep them equal to their masters.

    A copy is made in the first forward that needs it, and again if the master's version counter or address changed.
    Some writes change neither (fused and bitsandbytes optimizers, writes through ``.data``); they need ``refresh``
    after every optimizer step. The row factors of DoRA are kept in the same way. Adapters on stacks of experts have
    copies in the layout of grouped GEMMs.

    Args:
        compute_dtype: Dtype of the copies and of the low-rank GEMMs.
        status: Status of the installation.
    """

    def __init__(self, *, compute_dtype: torch.dtype, status: Status) -> None:
        self.compute_dtype = compute_dtype
        self.status = status
        # Whether masters are sharded, and gathered for each pass: no version counter tells whether a copy is stale.
        self.is_sharded = self._are_experts_sharded = False
        self._layers: list[LoraLayer] = []
        # PEFT's wrappers around stacks of experts.
        self._wrappers: list[LoraLayer] = []
        # The last result of ``pairs``: finding copies takes longer than marking them.
        self._paired: list[LowPrecisionCopy] = []

    def __len__(self) -> int:
        """Return the number of copies."""
        return len(self._copies())

    def pairs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return masters with their low-precision copies, for an optimizer that writes both in one pass
        (``FusedAdamW.attach_copies``); without those of experts, whose layouts differ.
        """
        self._paired = [
            copy for copy in self._copies() if not copy.num_experts and copy.is_copy_of(copy.master, self.compute_dtype)
        ]
        return [(copy.master, copy.tensor) for copy in self._paired]

    def mark_written(self, copies: Sequence[torch.Tensor]) -> None:
        """Mark copies, of those that ``pairs`` returned last, that an optimizer has written with their masters."""
        written = {id(copy) for copy in copies}
        for copy in self._paired:
            if id(copy.tensor) in written:
                copy.is_written = True
                copy.mark()

    def refresh(self, *, is_after_step: bool = False) -> None:
        """Copy every master into its low-precision copy.

        Args:
            is_after_step: Whether this follows an optimizer step, so that copies written by the step are skipped.

        Cost:
            One foreach copy over all adapters, and a launch for each second factor on experts. Reads masters, writes
            copies; no host sync. For DoRA also ``RowFactors.update`` of each layer.
        """
        self._copy_masters(is_after_step=is_after_step)
        self._refresh_factors()

    def _copy_masters(self, *, is_after_step: bool) -> None:
        copies = []
        for copy in self._copies():
            is_done = is_after_step and copy.is_written and copy.is_current()
            copy.is_written = False
            if is_done or not copy.is_copy_of(copy.master, self.compute_dtype):
                continue
            if copy.is_expert_last:
                copy.copy_master()
            else:
                copies.append(copy)
        if not copies:
            return
        with torch.no_grad():
            torch._foreach_copy_([copy.tensor for copy in copies], [copy.master_view() for copy in copies])
        for copy in copies:
            copy.mark()

    def read(self, linear: nn.Linear, *, num_experts: int = 0, is_expert_last: bool = False) -> torch.Tensor:
        """Return the weight of lora_A or lora_B in the compute dtype, refreshed if its version counter changed.

        The other arguments are those of ``LowPrecisionCopy``.
        """
        master = linear.weight
        if master.dtype is self.compute_dtype and not num_experts:
            return master.detach()
        if self.is_sharded and not num_experts:
            return master.detach().to(self.compute_dtype)
        copy = vars(linear).get(WEIGHT_ATTRIBUTE)
        if copy is None or not copy.is_copy_of(master, self.compute_dtype):
            copy = LowPrecisionCopy(master, self.compute_dtype, num_experts=num_experts, is_expert_last=is_expert_last)
            setattr(linear, WEIGHT_ATTRIBUTE, copy)
        elif not copy.is_current():
            copy.copy_master()
        return copy.tensor

    def read_experts(self, wrapper: PeftParamWrapper, name: str) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return current copies of lora_A and lora_B of an adapter as (E, R, columns); None if the masters have the
        compute dtype or are sharded.
        """
        linear_a, linear_b = wrapper.lora_A[name], wrapper.lora_B[name]
        if self._are_experts_sharded or linear_a.weight.dtype is linear_b.weight.dtype is self.compute_dtype:
            return None
        num_experts = wrapper.num_experts
        a_ERI = self.read(linear_a, num_experts=num_experts)
        return a_ERI, self.read(linear_b, num_experts=num_experts, is_expert_last=True)

    def watch_experts(self, model: nn.Module, patcher: ModelPatcher) -> None:
        """Attach to every wrapper around a stack, including wrappers that are swapped later."""
        self._wrappers = [module for module in model.modules() if isinstance(module, PeftParamWrapper)]
        for wrapper in self._wrappers:
            patcher.set_attribute(wrapper, COPIES_ATTRIBUTE, self)
            self._are_experts_sharded |= any(
                hasattr(linear.weight, "device_mesh") for linear in (*wrapper.lora_A.values(), *wrapper.lora_B.values())
            )
        if self._wrappers:
            patcher.add_undo(self._drop)

    def read_factors(self, layer: LoraLayer, name: str) -> torch.Tensor:
        """Return the row factors of a DoRA adapter, computed again if a version counter changed."""
        if self.is_sharded:
            a, b = (self.read(side[name]) for side in (layer.lora_A, layer.lora_B))
            return fresh_factors(layer, name, a, b)
        owner = vars(layer.lora_magnitude_vector[name])
        factors: RowFactors | None = owner.get(FACTORS_ATTRIBUTE)
        if factors is None or not factors.belongs_to(layer, name):
            factors = owner[FACTORS_ATTRIBUTE] = RowFactors(layer, name)
        if not factors.is_current():
            self._update(factors, layer, name)
        return factors.tensor

    def _update(self, factors: RowFactors, layer: LoraLayer, name: str) -> None:
        sides: list[Any] = [layer._modules[side] for side in ("lora_A", "lora_B")]
        copy_a, copy_b = (self.read(side._modules[name]) for side in sides)
        factors.update(copy_a, copy_b, float(layer.scaling[name]))

    def _refresh_factors(self) -> None:
        """Compute the row factors again; those of streamed weights in the next pass of their layer."""
        for layer in self._layers:
            for name, factors in factors_of(layer).items():
                factors.make_stale()
                is_there = STREAMED_ATTRIBUTE not in vars(layer.get_base_layer()) and not layer.merged
                if is_there and factors.belongs_to(layer, name):
                    self._update(factors, layer, name)

    def _owners(self) -> list[dict[str, Any]]:
        """Return the attributes of every lora_A and lora_B."""
        # Not as attributes, which take a microsecond each in modules.
        return [
            linear.__dict__
            for layer in (*self._layers, *self._wrappers)
            for name in ("lora_A", "lora_B")
            for linear in layer._modules[name]._modules.values()  # type: ignore[union-attr]
        ]

    def _copies(self) -> list[LowPrecisionCopy]:
        return [owner[WEIGHT_ATTRIBUTE] for owner in self._owners() if WEIGHT_ATTRIBUTE in owner]

    def _drop(self) -> None:
        self._paired = []
        for owner in self._owners():
            owner.pop(WEIGHT_ATTRIBUTE, None)
        for layer in self._layers:
            for magnitude in layer.lora_magnitude_vector.values():
                vars(magnitude).pop(FACTORS_ATTRIBUTE, None)


class _CopyForward:
    """The forward of a LoRA layer with low-precision copies; all other calls run the forward of PEFT's class."""

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        adapters: LowPrecisionAdapters = vars(self)[LAYER_ATTRIBUTE]
        name = None if args or kwargs else _plain_adapter(self, x, adapters=adapters)  # type: ignore[arg-type]
        if name is None:
            return super().forward(x, *args, **kwargs)  # type: ignore[misc]
        lora_A, lora_B = self.lora_A[name], self.lora_B[name]  # type: ignore[attr-defined]
        add_low_rank = functools.partial(
            lora_addmm, a_RD=lora_A.weight, b_NR=lora_B.weight, scale=self.scaling[name],  # type: ignore[attr-defined]
            copy_a_RD=adapters.read(lora_A), copy_b_NR=adapters.read(lora_B),
        )  # fmt: skip
        session = find_session(self)  # type: ignore[arg-type]
        if name in self.lora_variant:  # type: ignore[attr-defined]
            rows = add_low_rank(self.base_layer(x), x)  # type: ignore[attr-defined]
            magnitude, bias = self.lora_magnitude_vector[name].weight, self.base_layer.bias  # type: ignore[attr-defined]
            return scale_by_magnitude(rows, magnitude, adapters.read_factors(self, name), bias_N=bias)  # type: ignore[arg-type]
        if session is None or not session.is_recompute:
            return add_low_rank(self.base_layer(x), self.lora_dropout[name](x))  # type: ignore[attr-defined]
        point = value_name(self)  # type: ignore[arg-type]
        # A base that is trained, or is not a value point, may save tensors of its own, so it must run.
        is_unneeded = session.is_last(point) and is_frozen_point(self.base_layer)  # type: ignore[attr-defined]
        if is_unneeded:
            session.skip(value_name(self.base_layer))  # type: ignore[attr-defined]
        base = unneeded(x, lora_B.weight.shape[0]) if is_unneeded else self.base_layer(x)  # type: ignore[attr-defined]
        dropped = self.lora_dropout[name](x)  # type: ignore[attr-defined]
        with session.watch_end(point):
            out = add_low_rank(base, dropped)
        if is_unneeded:
            # The recompute continued, so the output may be read.
            with torch.no_grad():
                out.data = add_low_rank(self.base_layer(x), dropped)  # type: ignore[attr-defined]
        return out


class LoraLinear(_CopyForward, PeftLinear):
    """PEFT's LoRA on ``nn.Linear``, computing from low-precision copies."""


def install_low_precision_adapters(
    model: nn.Module, patcher: ModelPatcher, *, compute_dtype: torch.dtype
) -> LowPrecisionAdapters:
    """Make every LoRA and DoRA layer of a PEFT model compute in compute_dtype; its Parameters stay the fp32 masters.

    PEFT's names, files and methods do not change. A layer takes the fast path with exactly one active LoRA or DoRA
    adapter that is neither merged nor disabled (no other variant, no LoRA bias, no mixed batch; DoRA without dropout,
    on frozen dense or NF4 weights). All other cases run PEFT's own forward.

    Args:
        model: A PEFT model, or a module around one. Sharded adapters are cast as they are gathered, in each pass.
        patcher: Records the swaps.
        compute_dtype: torch.bfloat16 or torch.float16; with torch.float32 only DoRA layers are changed.

    Returns:
        The copies; call ``refresh()`` after each optimizer step. ``status`` is the status of the installation.

    Raises:
        OptionError: compute_dtype is not a floating dtype.

    Cost:
        Two bytes per adapter parameter, on the first forward; for DoRA 12 bytes per output column.
    """
    if not compute_dtype.is_floating_point:
        raise OptionError(f"compute_dtype must be a floating dtype, got {compute_dtype}.")
    adapters = LowPrecisionAdapters(
        compute_dtype=compute_dtype, status=Status(STATUS_NAME, "inactive", "no LoRA layers")
    )
    layers = {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}
    found = {old: class_for(old) for old in {type(layer) for layer in layers.values()}}
    classes = {old: new for old, new in found.items() if new is not None}
    served = {name: layer for name, layer in layers.items() if type(layer) in classes}
    adapters.status = _judge(layers, served=served, compute_dtype=compute_dtype)
    # Independent of the status, because the router may be installed later.
    if compute_dtype.itemsize < torch.float32.itemsize:
        adapters.watch_experts(model, patcher)
    if adapters.status.state != "active":
        return adapters
    adapters.is_sharded = _has_pieces(served)
    for name, layer in served.items():
        new = share_state(layer, classes[type(layer)])
        patcher.replace_module(model, name, new)
        patcher.set_attribute(new, LAYER_ATTRIBUTE, adapters)
        adapters._layers.append(new)
    patcher.add_undo(adapters._drop)
    return adapters


def copies_in(module: nn.Module) -> list[torch.Tensor]:
    """Return the low-precision copies that the adapters in a module hold now."""
    owners = [vars(linear) for linear in module.modules()]
    return [owner[WEIGHT_ATTRIBUTE].tensor for owner in owners if WEIGHT_ATTRIBUTE in owner]


def _judge(layers: dict[str, LoraLayer], *, served: dict[str, LoraLayer], compute_dtype: torch.dtype) -> Status:
    """Return the status: whether low-precision copies are needed, and for which layers."""
    # PEFT's own forward runs variants and biases (_plain_adapter).
    num_variants = sum(bool(_own_forward_reason(layer)) for layer in served.values())
    if num_variants == len(layers) > 0:
        reason = _own_forward_reason(next(iter(served.values())))
        return Status(STATUS_NAME, "inactive", f"PEFT's own forward for {num_variants} LoRA layers: {reason}")
    # Wrappers around routed experts have copies in another layout (moe/adapters.py).
    routed = {name: layer for name, layer in layers.items() if isinstance(layer, RoutedWrapper)}
    others = _count_types([layer for name, layer in layers.items() if name not in served and name not in routed])
    if not served and not routed:
        return Status(STATUS_NAME, "inactive", f"no plain LoRA layer; found {others}" if others else "no LoRA layers")
    weights = [
        linear.weight
        for layer in (*served.values(), *routed.values())
        for linear in (*layer.lora_A.values(), *layer.lora_B.values())
    ]
    dtypes = {weight.dtype for weight in weights}
    named = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
    num_dora = sum(any(is_dora(layer, name) for name in layer.lora_variant) for layer in served.values())
    of_dora = f"; row norms of {num_dora} DoRA layers once per step" if num_dora else ""
    if (dtypes == {compute_dtype} or compute_dtype is torch.float32) and not num_dora:
        return Status(STATUS_NAME, "inactive", f"adapters compute in the dtype they are held in ({named})")
    held = "sharded " if _has_pieces(served) else ""
    layers_and_stacks = " and ".join(
        [f"{len(served)} LoRA layers"] * bool(served) + [f"{len(routed)} stacks of experts"] * bool(routed)
    )
    reason = f"{layers_and_stacks}: {held}{named} masters, {str(compute_dtype).removeprefix('torch.')} compute{of_dora}"
    return Status(STATUS_NAME, "active", f"{reason}; PEFT's own forward for {others}" if others else reason)


def _own_forward_reason(layer: LoraLayer) -> str:
    """Return why PEFT's own forward runs all adapters of a layer; empty if it does not."""
    reasons = [variant_obstacle(layer, name) for name in layer.lora_A]
    return reasons[0] if reasons and all(reasons) else ""


def _has_pieces(layers: dict[str, LoraLayer]) -> bool:
    """Return whether adapter weights are sharded over ranks."""
    return any(
        hasattr(parameter, "device_mesh")
        for layer in layers.values()
        for parameter in layer.parameters()
        if parameter.requires_grad
    )


def _count_types(layers: list[LoraLayer]) -> str:
    """Return the number of layers of each class, as text."""
    names = [type(layer).__name__ for layer in layers]
    return ", ".join(f"{names.count(name)} {name}" for name in sorted(set(names)))


def _plain_adapter(layer: PeftLinear, x: torch.Tensor, *, adapters: LowPrecisionAdapters) -> str | None:
    """Return the one adapter whose low-precision copies can serve this call; None if PEFT's own forward must run."""
    forget_merged(layer)
    if layer.disable_adapters or layer.merged or not layer.cast_input_dtype_enabled:
        return None
    names = [name for name in layer.active_adapters if name in layer.lora_A]
    if len(names) != 1:
        return None
    name = names[0]
    linears, dtype = (layer.lora_A[name], layer.lora_B[name]), adapters.compute_dtype
    is_plain = not variant_obstacle(layer, name) and x.dtype is dtype and not is_autocast_on(x.device.type)
    # A hook or another class on lora_A or lora_B is an extension that must run.
    is_plain = is_plain and all(
        type(linear) is nn.Linear and not linear._forward_hooks and not linear._forward_pre_hooks for linear in linears
    )
    return name if is_plain else None


def class_for(old: type[LoraLayer]) -> type[nn.Module] | None:
    """Return the class that replaces exactly this PEFT class, or None."""
    if old is PeftLinear:
        return LoraLinear
    if old.__module__ == "peft.tuners.lora.bnb" and old.__name__ in ("Linear4bit", "Linear8bitLt"):
        return type(
            f"Lora{old.__name__}",
            (_CopyForward, old),
            {"__doc__": f"PEFT's LoRA on bitsandbytes {old.__name__}, computing from low-precision copies."},
        )
    return None
