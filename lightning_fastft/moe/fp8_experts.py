"""Compute the products of frozen expert weights in fp8 (e4m3 x e4m3); all else is unchanged.

The matrix of each expert has one scale, a power of 2, and each row of tokens or gradients has its own. Both scales are
factors of each sum, forward (over the input columns) and backward (over the output columns), so the same e4m3 weights
serve both, and rows of tokens are quantised once and gathered in e4m3. A scale per output column, as in dense layers,
would have to be multiplied into each gathered row of the gradient, for one expert at a time. e4m3 spans 18 bits: a
column 500 times smaller than the largest number of its expert keeps all digits. Tensor cores read e4m3 only along the
axis that they sum over, so a stack is held in both layouts.

Axes: E experts, I input columns, O output columns, T tokens, N routed slots.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from lightning_fastft.activations.host_parameter import is_plain
from lightning_fastft.core.patcher import ModelPatcher
from lightning_fastft.core.status import Status, summarize_obstacles
from lightning_fastft.hf.expert_nf4 import stack_names
from lightning_fastft.kernels.backends import TRITON_DTYPES
from lightning_fastft.kernels.fp8_linear.op import ALIGNED_COLUMNS, find_obstacle, quantise_rows, transpose
from lightning_fastft.kernels.fp8_linear.reference import FP8
from lightning_fastft.kernels.grouped_mm.op import grouped_mm_fp8
from lightning_fastft.kernels.grouped_mm.reference import Fp8Scales, GatheredRows, Rows, rows_of
from lightning_fastft.moe.adapters import WRAPPERS_ATTRIBUTE
from lightning_fastft.moe.expert_axis import find_axis

STATUS_NAME = "fp8 experts"
# Instance attribute, not in the state_dict. Of experts modules: parameter name -> Fp8Stack; of decoder layers: the
# stacks inside.
FP8_EXPERTS_ATTRIBUTE = "fastft_fp8_experts"


class Fp8Stack:
    """A frozen stack of expert weights in e4m3, in the layouts of both products.

    Args:
        owner: The ``Fp8Experts`` of the model.
        layer: The decoder layer of the experts.
        module: The experts module.
        name: Name of the parameter in it.
    """

    def __init__(self, owner: Fp8Experts, *, layer: nn.Module, module: nn.Module, name: str) -> None:
        self.owner = owner
        self._layer, self._module, self._name = layer, module, name
        # Identifies the weights that were quantised, to detect a change.
        self._key: tuple[Any, ...] | None = None
        self._forward_EOI: torch.Tensor | None = None
        self._backward_EIO: torch.Tensor | None = None
        self._scale_E: torch.Tensor | None = None

    def obstacle(self) -> str:
        """Return why the stack computes in its own dtype; empty if it computes in fp8.

        Cost:
            A few microseconds of the host.
        """
        weight = self._module._parameters.get(self._name)
        if weight is None:
            return "PEFT adds the adapters to the whole stack"
        if isinstance(self._layer, FSDPModule):
            return "the weights are sharded (FSDP2)"
        if find_axis(self._module) is not None:
            return "the experts are spread over ranks (expert_parallel)"
        if not is_plain(weight):
            return f"the weights are {type(weight).__name__}"
        reason = self.owner.obstacle(weight.device, weight.dtype)
        if reason:
            return reason
        if weight.requires_grad:
            return "the expert weights are trained"
        if any(wrapper.merged for wrapper in vars(self._module).get(WRAPPERS_ATTRIBUTE, {}).values()):
            return "adapters are merged into the weights"
        odd = next((size for size in weight.shape[1:] if size % ALIGNED_COLUMNS), None)
        return "" if odd is None else f"fp8 products need multiples of {ALIGNED_COLUMNS} columns, and a stack has {odd}"

    def quantise(self) -> None:
        """Write both layouts of the present weights, in the held memory if it fits; no-op if they are current.

        Cost:
            The first time three reads of the weights, one write of two bytes for each, four launches per expert; then a
            few microseconds of the host. No host sync.
        """
        weight = self._module._parameters[self._name]
        assert weight is not None
        # A merge by PEFT does not change version counters; a permanent merge removes PEFT's wrapper.
        is_wrapped = self._name in vars(self._module).get(WRAPPERS_ATTRIBUTE, {})
        key = (weight.data_ptr(), weight._version, weight.device, is_wrapped)
        if key == self._key:
            return
        # An inference tensor could not be read in a training step.
        with torch.inference_mode(mode=False), torch.no_grad():
            is_transposed = bool(getattr(self._module, "is_transposed", True))
            weight_EOI = weight.detach().transpose(1, 2) if is_transposed else weight.detach()
            peak_E = torch.linalg.vector_norm(weight_EOI, float("inf"), dim=(1, 2))
            backend = self.owner.backend
            scale_E = quantise_rows(peak_E[:, None], round_scales_to_power_of_2=True, backend=backend).scale_T
            if self._forward_EOI is None or self._scale_E is None or self._forward_EOI.device != weight.device:
                self._forward_EOI = torch.empty(weight_EOI.shape, dtype=FP8, device=weight.device)
                self._backward_EIO = torch.empty(weight_EOI.mT.shape, dtype=FP8, device=weight.device)
                self._scale_E = torch.empty_like(scale_E)
            assert self._backward_EIO is not None
            self._scale_E.copy_(scale_E)
            # The products are exact, because scales are powers of 2.
            for dense_OI, inverse, values_OI, turned_IO in zip(
                weight_EOI, 1 / scale_E, self._forward_EOI, self._backward_EIO
            ):
                values_OI.copy_(dense_OI * inverse)
                transpose(values_OI, out_IT=turned_IO, backend=backend, is_checked=False)
        self._key = key

    def product(self, x_NI: Rows, end_E: torch.Tensor, *, is_backward: bool = False, **addend: Any) -> torch.Tensor:
        """Return ``grouped_mm`` of rows and this stack, or its transpose in the backward; quantises the rows.

        Args:
            x_NI: Rows in the dtype of the result, in order or gathered.
            end_E: As in ``grouped_mm``.
            is_backward: Multiply gradients of the output.
            addend: As in ``grouped_mm``.

        Cost:
            Reads the rows before they are gathered and writes them in e4m3, then grouped_mm_fp8.
        """
        self.owner.begin()
        weight = self._backward_EIO if is_backward else self._forward_EOI
        assert weight is not None
        assert self._scale_E is not None
        backend, rows = self.owner.backend, rows_of(x_NI)
        values, scale_T = quantise_rows(rows, backend=backend, is_checked=False)
        return grouped_mm_fp8(
            x_NI._replace(x_TI=values) if isinstance(x_NI, GatheredRows) else values,
            weight,
            end_E,
            scales=Fp8Scales(scale_T, self._scale_E),
            dtype=rows.dtype,
            backend=backend,
            is_checked=False,
            **addend,
        )

    def memory(self) -> list[torch.Tensor]:
        """Return the held tensors, whose addresses stay the same until release."""
        held = (self._forward_EOI, self._backward_EIO, self._scale_E)
        return [tensor for tensor in held if tensor is not None]

    def release(self) -> None:
        """Free the memory; it is allocated again when needed."""
        self._forward_EOI = self._backward_EIO = self._scale_E = self._key = None

    def __getstate__(self) -> dict[str, Any]:
        """Drop the fp8 weights from a copy or pickle; a copied model quantises its own."""
        return vars(Fp8Stack(self.owner, layer=self._layer, module=self._module, name=self._name))


class Fp8Experts:
    """The expert weights of one model in fp8.

    Args:
        layers: The decoder layers, and the experts modules in each.
        is_routed: Returns whether BincountRouter runs an experts module.
        is_emulated: Compute with the reference, in plain PyTorch on any device.

    Cost:
        Two more bytes for each frozen expert weight, quantised once before training or at its first product. The
        original weights stay, for files, merging and generation.
    """

    def __init__(
        self,
        layers: Iterable[tuple[nn.Module, Sequence[nn.Module]]],
        *,
        is_routed: Callable[[nn.Module], bool],
        is_emulated: bool,
    ) -> None:
        self.is_emulated = is_emulated
        # Backend of the kernels.
        self.backend = "reference" if is_emulated else "auto"
        self._is_routed = is_routed
        self._stacks = [
            (
                layer,
                module,
                {name: Fp8Stack(self, layer=layer, module=module, name=name) for name in stack_names(module)},
            )
            for layer, modules in layers
            for module in modules
        ]
        self._seen: Status | None = None

    def install(self, patcher: ModelPatcher) -> None:
        """Make the experts compute in fp8 until the patcher is undone."""
        of_layers: dict[int, tuple[Fp8Stack, ...]] = {}
        for layer, module, stacks in self._stacks:
            patcher.set_attribute(module, FP8_EXPERTS_ATTRIBUTE, stacks)
            of_layers[id(layer)] = (*of_layers.get(id(layer), ()), *stacks.values())
            patcher.set_attribute(layer, FP8_EXPERTS_ATTRIBUTE, of_layers[id(layer)])
        patcher.add_undo(self.close)

    def close(self) -> None:
        """Free the memory."""
        self._seen = self.status()
        for _, _, stacks in self._stacks:
            for stack in stacks.values():
                stack.release()

    def prepare(self) -> None:
        """Quantise before the first step, so that a plan of activations counts the memory.

        Cost:
            As Fp8Stack.quantise.
        """
        for _, module, stacks in self._stacks:
            for stack in stacks.values():
                if self._is_routed(module) and not stack.obstacle():
                    stack.quantise()

    def begin(self) -> None:
        """Record which stacks compute in fp8, at the first product, because the model may move after the run."""
        if self._seen is None:
            self._seen = self.status()

    def status(self) -> Status:
        """Return how many stacks compute in fp8, and why others do not; the counts are those of the first product or,
        before it, of the present state.
        """
        if self._seen is not None:
            return self._seen
        reasons = Counter(
            stack.obstacle() if self._is_routed(module) else "BincountRouter is not installed"
            for _, module, stacks in self._stacks
            for stack in stacks.values()
        )
        counts = f"stacks of {len(self._stacks)} layers in e4m3{', in plain PyTorch' if self.is_emulated else ''}"
        return summarize_obstacles(
            STATUS_NAME, reasons, counts=counts, otherwise="experts compute in the dtype of the model"
        )

    def obstacle(self, device: torch.device, dtype: torch.dtype) -> str:
        """Return why stacks of this dtype cannot compute in fp8 on a device; empty if they can."""
        if self.is_emulated:
            return "" if dtype in TRITON_DTYPES else f"the weights are {dtype}"
        return find_obstacle(device) or ("" if dtype is torch.bfloat16 else f"the weights are {dtype}, not bf16")


def read_fp8(module: nn.Module, name: str) -> Fp8Stack | None:
    """Return the stack of an experts module in e4m3, current; None if it computes in its own dtype.

    Cost:
        A few microseconds of the host; the first time Fp8Stack.quantise.
    """
    stacks: dict[str, Fp8Stack] = vars(module).get(FP8_EXPERTS_ATTRIBUTE, {})
    stack = stacks.get(name)
    if stack is None or stack.obstacle():
        return None
    stack.quantise()
    return stack


def held_memory(layer: nn.Module) -> list[torch.Tensor]:
    """Return the e4m3 weights of the experts in a layer, whose addresses recorded graphs may read."""
    stacks: tuple[Fp8Stack, ...] = vars(layer).get(FP8_EXPERTS_ATTRIBUTE, ())
    return [tensor for stack in stacks for tensor in stack.memory()]


def refresh_written(layer: nn.Module) -> None:
    """Quantise the experts of a layer again if their weights were written; recorded graphs do not check this.

    Cost:
        A few microseconds of the host.
    """
    stacks: tuple[Fp8Stack, ...] = vars(layer).get(FP8_EXPERTS_ATTRIBUTE, ())
    for stack in stacks:
        if stack.memory():
            stack.quantise()
