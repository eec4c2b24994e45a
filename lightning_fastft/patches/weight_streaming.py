"""Stream the frozen weights of a model's decoder layers from the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from lightning_fastft.activations.streams import CopyStreams
from lightning_fastft.activations.weights import DEFAULT_NUM_SLOTS, STREAMED_ATTRIBUTE, WeightStreamer
from lightning_fastft.core.errors import OptionError, SwapError, UnsupportedModelError
from lightning_fastft.core.patcher import ModelPatcher
from lightning_fastft.core.status import Status
from lightning_fastft.hf.expert_nf4 import ExpertsNF4
from lightning_fastft.hf.families import decoder_layers

STATUS_NAME = "frozen weights"

AllocateHost = Callable[[int], torch.Tensor]


def install_weight_streaming(
    model: PreTrainedModel,
    patcher: ModelPatcher,
    *,
    streams: CopyStreams,
    allocate_host: AllocateHost | None = None,
    free_host: Callable[[torch.Tensor], None] | None = None,
    num_slots: int = DEFAULT_NUM_SLOTS,
) -> tuple[Status, WeightStreamer]:
    """Move the frozen weights of every decoder layer to the host, and copy each layer in before its forward and
    backward.

    It works with and without recompute, in evaluation and in generation, for NF4 and plain weights. Adapters, trained
    weights, buffers, and the shared tables of NF4 stay on the device. A state dict contains the streamed weights in
    host memory; loading a state dict that contains them, merging adapters, and reading weights of a layer that is not
    in use raise. The loss must depend on the last hidden states, as in every causal language model.

    The model may be on its device or on the host, to which undo returns the weights. Undo the patcher before the model
    is moved or merged, or weights are loaded; a move to the device that has the weights already is allowed.

    Args:
        model: A Hugging Face causal language model, also inside a PEFT model.
        patcher: Records the changes; undo returns the weights to where they were, also after an exception.
        streams: The copy streams of the device.
        allocate_host: Takes a number of bytes and returns pinned host memory (uint8). None for pageable memory, on a
            CPU only.
        free_host: As in ``WeightStreamer``.
        num_slots: Number of layers that fit on the device at once.

    Returns:
        The active status, which says where the weights are, and the attached streamer.

    Raises:
        OptionError: Nothing in the layers is frozen, or layers share weights with each other or with the rest of the
            model.
        UnsupportedModelError: Weights are sharded (DTensor) or in 8 bits.
        HostMemoryError: allocate_host returned too little memory, or memory that is not pinned.

    Cost:
        One copy of the streamed weights at installation, then the cost of WeightStreamer.
    """
    layers = decoder_layers(model)
    frozen = [_frozen_tensors(layer, number=number) for number, layer in enumerate(layers)]
    if not any(frozen):
        raise OptionError(
            f"weights='stream' needs frozen weights, and every weight in the decoder layers of {type(model).__name__} "
            "is trained: use LoRA, or weights='resident'."
        )
    _check_not_shared(model, layers, frozen)
    streamer = WeightStreamer(
        [list(tensors.values()) for tensors in frozen],
        streams=streams,
        num_slots=num_slots,
        allocate_host=allocate_host,
        free_host=free_host,
    )
    streamer.attach()
    patcher.add_undo(streamer.detach)
    for index, (layer, tensors) in enumerate(zip(layers, frozen)):
        _settle_experts(layer, streams.device)
        link = _LayerLink(streamer, index=index, names=list(tensors))
        serve_state_dict(layer, link.values, patcher)
        for module in layer.modules():
            patcher.set_attribute(module, STREAMED_ATTRIBUTE, True)
            if isinstance(module, BaseTunerLayer):
                patcher.set_attribute(module, "merge", _refuse_merge)
        # Weights must be on the device before another hook or the layer reads them.
        patcher.add_undo(layer.register_forward_pre_hook(link.before_forward, prepend=True).remove)
        patcher.add_undo(layer.register_forward_hook(link.after_forward).remove)
    gib = 2**30
    reason = (
        f"{len(layers)} layers, {streamer.num_host_bytes / gib:.2f} GiB on the host, "
        f"{streamer.num_slot_bytes / gib:.2f} GiB of device slots"
    )
    return Status(STATUS_NAME, "active", reason), streamer


class _LayerLink:
    """Connect one decoder layer to the streamer: its forward, its backward, and its entries in a state dict."""

    def __init__(self, streamer: WeightStreamer, *, index: int, names: list[str]) -> None:
        self.streamer = streamer
        self.index = index
        self._names = names

    def before_forward(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Copy the layer in; in a recompute it is already on the device."""
        self.streamer.use(self.index, direction=1)

    def after_forward(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Register hooks that copy the layer in when the backward reaches an output."""
        for tensor in output if isinstance(output, (tuple, list)) else (output,):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(self.before_backward)

    def before_backward(self, gradient: torch.Tensor) -> None:
        """Copy the layer in; the gradient does not change."""
        self.streamer.use(self.index, direction=-1)

    def values(self) -> Mapping[str, torch.Tensor]:
        """Return the streamed tensors, keyed by their names in a state dict of the layer."""
        return dict(zip(self._names, self.streamer.host_views(self.index)))


def _refuse_merge(*_: object, **__: object) -> None:
    """Take the place of the merge of an adapted layer, which would write into the device slot."""
    raise SwapError(
        "Adapters cannot be merged while weights are streamed: their base is on the host. Merge after the run, or use "
        "OffloadCheckpointing(weights='resident')."
    )


def _frozen_tensors(layer: nn.Module, *, number: int) -> dict[str, torch.Tensor]:
    """Return the tensors of a layer that can be streamed, keyed by their names in the layer's state dict.

    The tables of an NF4 state (code, nested code) and its offset stay on the device, a few hundred bytes: bitsandbytes
    shares the tables among weights and reads the offset for a state dict. The bias of an NF4 layer stays too, because
    bitsandbytes casts it in place in a forward.
    """
    resident = {id(parameter) for parameter in _adapter_parameters(layer)}
    resident |= {
        id(module.bias) for module in layer.modules() if hasattr(getattr(module, "weight", None), "quant_state")
    }
    found: dict[str, torch.Tensor] = {}
    for name, parameter in layer.named_parameters(remove_duplicate=False):
        if parameter.requires_grad or id(parameter) in resident:
            continue
        check_kind(parameter, name=f"{name} of decoder layer {number}")
        if isinstance(parameter, ExpertsNF4):
            stack = parameter.stack
            found |= {
                name: stack.packed_EC,
                f"{name}.absmax": stack.absmax_EQ,
                f"{name}.nested_absmax": stack.nested_absmax_EG,
            }
            continue
        found[name] = parameter
        quant_state = getattr(parameter, "quant_state", None)
        if quant_state is not None:
            found[f"{name}.absmax"] = quant_state.absmax
            if quant_state.nested:
                found[f"{name}.nested_absmax"] = quant_state.state2.absmax
    return found


def _settle_experts(layer: nn.Module, device: torch.device) -> None:
    """Move what is left of NF4 stacks to the device, so that they name it and a move of the module skips them."""
    for parameter in layer.parameters():
        if isinstance(parameter, ExpertsNF4) and parameter.device != device:
            parameter.data = parameter.on(device)


def _adapter_parameters(layer: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters of PEFT's adapters, including frozen ones, which may be activated later."""
    for module in layer.modules():
        if isinstance(module, BaseTunerLayer):
            for name in module.adapter_layer_names:
                part = getattr(module, name, None)
                if isinstance(part, (nn.Module, nn.ParameterDict)):
                    yield from part.parameters()


def check_kind(parameter: torch.Tensor, *, name: str) -> None:
    """Raise on weights that are not one block of memory.

    Raises:
        UnsupportedModelError: The weight is sharded (DTensor) or in 8 bits.
    """
    if isinstance(parameter, DTensor):
        raise UnsupportedModelError(
            f"{name} is sharded (DTensor, FSDP2), and only unsharded weights can be kept on the host. Use "
            "weights='resident' with strategy='fastft_fsdp', or strategy='fastft' or 'fastft_ddp'."
        )
    if hasattr(parameter, "SCB"):
        raise UnsupportedModelError(
            f"{name} is an 8-bit weight of bitsandbytes, which keeps it in a second place: use quantization='nf4'."
        )


def _check_not_shared(model: nn.Module, layers: list[nn.Module], frozen: list[dict[str, torch.Tensor]]) -> None:
    """Raise on a streamed tensor that anything outside its layer also reads."""
    owner = {
        id(tensor): f"{name} of decoder layer {number}"
        for number, tensors in enumerate(frozen)
        for name, tensor in tensors.items()
    }
    inside = {id(module) for layer in layers for module in layer.modules()}
    for module_name, module in model.named_modules(remove_duplicate=False):
        for name, tensor in module._parameters.items():
            if tensor is not None and id(module) not in inside and id(tensor) in owner:
                raise OptionError(
                    f"{owner[id(tensor)]} is also {module_name}.{name}: tied weights cannot be streamed; use "
                    "weights='resident'."
                )


def serve_state_dict(
    module: nn.Module, values: Callable[[], Mapping[str, torch.Tensor]], patcher: ModelPatcher
) -> None:
    """Fill state dicts with the values from the host, and raise on loading values that would be lost.

    Args:
        module: The module whose tensors are on the host.
        values: Returns them, keyed by their names in a state dict of the module.
        patcher: Records the hooks.
    """

    def fill(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any]) -> None:
        for name, value in values().items():
            if prefix + name in state_dict:
                state_dict[prefix + name] = value

    def refuse(module: nn.Module, state_dict: Mapping[str, Any], prefix: str, *rest: Any) -> None:
        lost = [prefix + name for name in values() if prefix + name in state_dict]
        if lost:
            raise SwapError(
                f"{lost[0]} is on the host and cannot be loaded. Load the model first, then move its weights to the "
                "host."
            )

    patcher.add_undo(module.register_state_dict_post_hook(fill).remove)
    patcher.add_undo(module.register_load_state_dict_pre_hook(refuse).remove)
