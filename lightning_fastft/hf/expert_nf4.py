"""Experts in NF4: weights are quantised per expert, and dequantised only while a GEMM reads them.

Axes: E experts, I input columns, O output columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import nn

from lightning_fastft.core.errors import UnsupportedModelError
from lightning_fastft.core.status import Status
from lightning_fastft.hf.expert_nf4_tensor import ExpertsNF4, check_weight, quantise_stack
from lightning_fastft.hf.families import is_on_interface
from lightning_fastft.kernels.nf4_experts.reference import NF4Stack

STATUS_NAME = "NF4 experts"
# Instance attribute, not in the state_dict: the buffer for dequantised stacks of a model.
BUFFER_ATTRIBUTE = "fastft_dense_buffer"

_LLAMA4 = "Llama4TextExperts"
# Experts that are already quantised in another format.
_FOREIGN = ("Mxfp4", "FP8", "Fp8")
# Suffixes of the other tensors in a state dict; the packed weights have the name of the weight. Three suffixes are
# those of bitsandbytes.
_PARTS = ("absmax", "nested_absmax", "offset", "quant_map", "nested_quant_map")


def quantise_experts(model: nn.Module) -> Status:
    """Quantise every stack of expert weights inside model to NF4; all stacks then share one dense buffer.

    Format and values are equal to ``bitsandbytes.functional.quantize_4bit`` with ``quant_type="nf4"`` and
    ``compress_statistics=True`` for each expert. Names, shapes and dtypes of the parameters do not change. They become
    frozen.

    Args:
        model: Any module: a transformers model, with or without PEFT's adapters.

    Returns:
        Active with the number of stacks, or inactive without stacks of experts.

    Raises:
        UnsupportedModelError: The number of weights of an expert is not a multiple of 64, or they are in fp8, MXFP4 or
            another format. Nothing was changed.
        MissingDependencyError: bitsandbytes is not installed.

    Cost:
        One read of the weights and a few host syncs of bitsandbytes per expert. Peak memory is the model plus one stack
        in NF4.

    Source:
        NF4 and double quantisation: QLoRA, arXiv 2305.14314.

    Example:
        >>> quantise_experts(nn.Linear(2, 2)).state
        'inactive'
    """
    stacks = check_experts(model)
    buffer = DenseBuffer()
    for module, name in stacks:
        _quantise_parameter(module, name, buffer)
    return describe_experts(model)


def describe_experts(model: nn.Module) -> Status:
    """Return a status with the format and size of the experts inside model."""
    stacks = [module._parameters[name] for module, name in _find_stacks(model)]
    held = [cast(Any, weight) for weight in stacks if isinstance(weight, ExpertsNF4)]
    if not held:
        return Status(STATUS_NAME, "inactive", f"no stacks of experts in {type(model).__name__}")
    num_bytes = sum(weight.held_bytes for weight in held)
    num_dense_bytes = sum(weight.nbytes for weight in held)
    sizes = f"{num_bytes / 2**30:.2f} GiB instead of {num_dense_bytes / 2**30:.2f} GiB"
    return Status(STATUS_NAME, "active", f"{len(held)} stacks, double quantisation, {sizes}")


def check_experts(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """Return every stack of expert weights inside model, as modules and names; also on the meta device.

    Raises:
        UnsupportedModelError: A stack cannot be quantised to NF4.
    """
    stacks = list(_find_stacks(model))
    for module, name in stacks:
        _check_stack(module, name)
    return stacks


def is_stack(module: nn.Module, name: str) -> bool:
    """Return whether a parameter is a stack of routed experts' weights, quantised or not."""
    # Compare Llama 4 by name: its experts do not use the ExpertsInterface.
    is_experts = is_on_interface(module) or any(cls.__name__ == _LLAMA4 for cls in type(module).__mro__)
    return is_experts and name in stack_names(module)


class DenseBuffer:
    """Memory for one dense stack per device, shared by all layers of a model.

    The latest result is valid; earlier ones are overwritten. Copies and pickles are empty.
    """

    def __init__(self) -> None:
        self._memory: dict[tuple[torch.device, torch.dtype], torch.Tensor] = {}

    def take(self, shape: torch.Size, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return uninitialised memory of a shape; earlier results become invalid."""
        held = self._memory.get((device, dtype))
        if held is None or held.numel() < shape.numel():
            # Free the old buffer first: the device may not have memory for two.
            self._memory.pop((device, dtype), None)
            del held
            # The first call may be in evaluation, and training cannot write an inference tensor.
            with torch.inference_mode(mode=False):
                held = self._memory[device, dtype] = torch.empty(shape.numel(), dtype=dtype, device=device)
        return held[: shape.numel()].view(shape)

    def __reduce__(self) -> tuple[type[DenseBuffer], tuple[()]]:
        return DenseBuffer, ()


class QuantisedWeight:
    """An NF4 weight that routed experts use like a dense one.

    Args:
        weight: The stack of the module.
        is_transposed: Whether its memory order is (E, I, O); else it is (E, O, I).
        buffer: Memory for the dense weight.
    """

    def __init__(self, weight: ExpertsNF4, *, is_transposed: bool, buffer: DenseBuffer) -> None:
        self._weight = weight
        self._is_transposed = is_transposed
        self._buffer = buffer
        self.dtype = weight.dtype
        self.device = weight.device
        self.shape = weight.shape if is_transposed else weight.shape[:1] + weight.shape[:0:-1]

    def dense(self) -> torch.Tensor:
        """Return the weight as (E, I, O), valid until the next call for this model; one launch, no host sync."""
        weight = self._weight
        # Dequantise the whole stack: with thousands of tokens every expert has some.
        dense = weight.dense(out=self._buffer.take(weight.shape, dtype=self.dtype, device=self.device))
        return dense if self._is_transposed else dense.transpose(1, 2)


def read_nf4(module: nn.Module, name: str, weight: torch.Tensor) -> QuantisedWeight | None:
    """Return the handle of a stack in NF4; None for any other weight.

    Raises:
        UnsupportedModelError: The stack is trained.
    """
    if not isinstance(weight, ExpertsNF4):
        return None
    if weight.requires_grad:
        raise UnsupportedModelError(
            f"{type(module).__name__}.{name} is in NF4 and requires a gradient, but NF4 cannot be trained. Freeze it "
            "and train adapters "
            "(target_parameters), or load the model without quantization."
        )
    buffer = vars(module).setdefault(BUFFER_ATTRIBUTE, DenseBuffer())
    return QuantisedWeight(weight, is_transposed=bool(getattr(module, "is_transposed", True)), buffer=buffer)


def _find_stacks(root: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Yield every stack of expert weights inside root; raise on experts in other quantised formats."""
    for path, module in root.named_modules():
        if type(module).__name__.startswith(_FOREIGN) and "Experts" in type(module).__name__:
            raise UnsupportedModelError(
                f"{path} is a {type(module).__name__}: its experts have another low-precision format and cannot be "
                "quantised to NF4. Load the "
                "checkpoint dequantised, for MXFP4 with Mxfp4Config(dequantize=True), or a checkpoint in bf16."
            )
        yield from ((module, name) for name in stack_names(module) if is_stack(module, name))


def stack_names(module: nn.Module) -> tuple[str, str]:
    """Return the names of both stacks; without a gate the first is the up projection."""
    return ("gate_up_proj" if getattr(module, "has_gate", True) else "up_proj", "down_proj")


def _check_stack(module: nn.Module, name: str) -> None:
    """Raise on a stack that is not a plain parameter, or that NF4 cannot represent."""
    weight = module._parameters.get(name)
    title = f"{type(module).__name__}.{name}"
    if weight is None or type(weight) not in (nn.Parameter, ExpertsNF4):
        shown = "not a parameter" if weight is None else f"a {type(weight).__name__}"
        raise UnsupportedModelError(
            f"{title} is {shown}, and only plain parameters can be quantised to NF4. Quantise before the model is "
            "sharded and outside a forward."
        )
    if not isinstance(weight, ExpertsNF4):
        check_weight(title, weight)


def _quantise_parameter(module: nn.Module, name: str, buffer: DenseBuffer) -> None:
    """Replace one stack by its NF4 form, and make state dicts of the module contain plain tensors."""
    weight = module._parameters[name]
    assert weight is not None
    if not isinstance(weight, ExpertsNF4):
        module._parameters[name] = nn.Parameter(quantise_stack(weight), requires_grad=False)
    if BUFFER_ATTRIBUTE not in vars(module):
        module.register_state_dict_post_hook(_split_entries)
        module.register_load_state_dict_pre_hook(_join_entries)
    setattr(module, BUFFER_ATTRIBUTE, buffer)


def _split_entries(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    """Write the packed weights under the weight's name into a state dict, and the other tensors with suffixes."""
    for name in stack_names(module):
        weight = state_dict.get(prefix + name)
        if isinstance(weight, ExpertsNF4):
            state_dict[prefix + name] = weight.stack.packed_EC
            state_dict.update({f"{prefix}{name}.{part}": value for part, value in zip(_PARTS, weight.stack[1:])})


def _join_entries(
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: Any,
    strict: bool,
    missing_keys: list[str],
    *rest: Any,
) -> None:
    """Combine the entries of a quantised stack, and quantise a dense one."""
    for name in stack_names(module):
        packed = state_dict.get(prefix + name)
        own = module._parameters.get(name)
        if not isinstance(own, ExpertsNF4) or packed is None or isinstance(packed, ExpertsNF4):
            continue
        if packed.dtype is not torch.uint8:
            if packed.shape == own.shape:
                state_dict[prefix + name] = quantise_stack(packed.to(own.device, own.dtype))
            continue
        keys = [f"{prefix}{name}.{part}" for part in _PARTS]
        lost = [key for key in keys if key not in state_dict]
        if lost:
            missing_keys.extend(lost)
            continue
        stack = NF4Stack(packed, *(state_dict.pop(key) for key in keys))
        if packed.shape == (own.shape[0], own.shape[1] * own.shape[2] // 2):
            state_dict[prefix + name] = ExpertsNF4(stack, shape=own.shape, dtype=own.dtype)
