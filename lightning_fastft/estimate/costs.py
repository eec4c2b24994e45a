"""Estimate the cost of a training step on a GPU from its published rates.

Layers run on the meta device, so neither weights nor a GPU are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer
from transformers import PretrainedConfig, PreTrainedModel

from lightning_fastft.activations.budgets import AUTO_VRAM_SHARE
from lightning_fastft.activations.values import ATTENTION_VALUE
from lightning_fastft.core.checks import check_choice, check_float, check_int
from lightning_fastft.core.errors import UnsupportedModelError
from lightning_fastft.estimate.machines import Gpu
from lightning_fastft.estimate.metering import (
    NF4_BYTES_PER_WEIGHT,
    WINDOW_ATTRIBUTE,
    Meter,
    Reading,
    set_metered_attention,
)
from lightning_fastft.hf.expert_nf4 import check_experts
from lightning_fastft.hf.families import decoder_layers
from lightning_fastft.hf.loading.source import ModelSource, auto_class
from lightning_fastft.hf.lora import check_patterns
from lightning_fastft.hf.lora_targets import ALL_LINEAR, find_default_targets
from lightning_fastft.kernels.cross_entropy.op import DEFAULT_CHUNK_ROWS
from lightning_fastft.patches.weight_streaming import movable_embedding_bytes
from lightning_fastft.planner.step import SegmentCost, StepCost, ValueCost

# Trained adapters: fp32 master, gradient and AdamW's two moments.
_MASTER_BYTES = 4 * 4
# Masters of whole weights: fp32 master and moments; weight and gradient are counted in their dtype.
_WHOLE_MASTER_BYTES = 3 * 4
_BASE_SUFFIX = ".base_layer"
# Bytes that AdamW and clipping move per byte of a trained tensor: the gradient twice, weight and moments in and out,
# and low-precision copies of adapters.
_OPTIMIZER_PASSES = 10


def model_costs(
    model: PreTrainedModel | PretrainedConfig | Mapping[str, Any] | ModelSource,
    *,
    num_tokens: int,
    mean_document_tokens: float,
    machine: Gpu,
    quantization: Literal["nf4"] | None = None,
    lora_rank: int | None = None,
    lora_targets: str | Sequence[str] = "all-linear",
    dtype: torch.dtype = torch.bfloat16,
    has_masters: bool = False,
    optimizer: Callable[[list[nn.Parameter]], Optimizer] | None = None,
) -> StepCost:
    """Return the estimated cost of a step over one pack, layer by layer.

    One decoder layer of each kind runs forward and backward on the meta device. The times of its operators follow from
    the published rates of the GPU, times the shares of these rates that were measured on an H200. All tokens count as
    labelled.

    Args:
        model: A configuration, or a transformers model on the meta device, to which adapters are added.
        num_tokens: Tokens of a pack; under context parallelism, of the share of one GPU.
        mean_document_tokens: Length of the whole document of a token, averaged over tokens.
        machine: The GPU.
        quantization: "nf4" stores the weights of all linear layers except the head in NF4.
        lora_rank: Rank of the adapters of a frozen base; None trains every weight.
        lora_targets: PEFT's ``target_modules``.
        dtype: Dtype of weights and arithmetic.
        has_masters: Whether fp32 masters of trained weights are held beside weights of lower precision.
        optimizer: Returns the optimizer of whole weights, whose ``state_bytes`` then count instead of two moments in
            the dtype of the weights.

    Raises:
        UnsupportedModelError: A layer does not run on the meta device.

    Cost:
        Some seconds on the host; no weights and no device are needed.

    Source:
        own; shares in estimate/metering.py.
    """
    check_int("num_tokens", num_tokens, low=1)
    check_float("mean_document_tokens", mean_document_tokens, low=1.0)
    check_choice("quantization", quantization, (None, "nf4"))
    base = model if isinstance(model, PreTrainedModel) else build_on_meta(model, dtype=dtype)
    set_metered_attention(base)
    head = base.get_output_embeddings()
    quantized = _quantised_weights(base, skipped=head) if quantization else []
    if lora_rank is not None:
        _add_adapters(base, rank=check_int("lora_rank", lora_rank, low=1), targets=lora_targets)
    bytes_of = _ByteCounter(quantized, has_adapters=lora_rank is not None, has_masters=has_masters)
    if optimizer is not None and lora_rank is None:
        given = optimizer([parameter for parameter in base.parameters() if parameter.requires_grad])
        bytes_of.state_bytes = getattr(given, "state_bytes", None)
    layers = decoder_layers(base)
    calls = _record_calls(base, layers, num_tokens=num_tokens)
    meter = Meter(machine, document_tokens=mean_document_tokens, resident=list(base.parameters()), quantized=quantized)
    kinds: dict[tuple[Any, ...], SegmentCost] = {}
    segments = []
    for layer, call in zip(layers, calls):
        kind = _kind(layer)
        if kind not in kinds:
            kinds[kind] = _measure_layer(layer, call, meter, bytes_of)
        segments.append(kinds[kind])
    head_bytes, head_ms = _head_cost(base, num_tokens=num_tokens, machine=machine, dtype=dtype)
    trained = [parameter for parameter in base.parameters() if parameter.requires_grad]
    optimizer_bytes = sum(
        parameter.numel() * (4 if lora_rank is not None else parameter.element_size()) for parameter in trained
    )
    return StepCost(
        segments=tuple(segments),
        base_bytes=bytes_of.all(base.parameters()),
        head_peak_bytes=head_bytes,
        head_ms=head_ms,
        other_ms=_OPTIMIZER_PASSES * optimizer_bytes / machine.reached_bytes_per_s * 1e3,
        embedding_bytes=movable_embedding_bytes(base),
    )


def build_on_meta(
    model: PretrainedConfig | Mapping[str, Any] | ModelSource, *, dtype: torch.dtype = torch.bfloat16
) -> PreTrainedModel:
    """Return the model of a configuration on the meta device, without adapters."""
    source = model if isinstance(model, ModelSource) else ModelSource(model, init="random")  # type: ignore[arg-type]
    with torch.device("meta"):
        return auto_class(source.config).from_config(source.config, dtype=dtype).train()


def default_vram_bytes(gpu: Gpu, cost: StepCost) -> int:
    """Return the device memory that a run takes by default: what is resident, and most of the rest.

    A GPU too small for the resident bytes gives all of its memory, for streamed weights.
    """
    resident_bytes = min(cost.base_bytes, gpu.memory_bytes)
    return resident_bytes + int(AUTO_VRAM_SHARE * (gpu.memory_bytes - resident_bytes))


def _add_adapters(model: PreTrainedModel, *, rank: int, targets: str | Sequence[str]) -> None:
    """Add adapters to the modules of the model, in their compute dtype."""
    from peft import LoraConfig, inject_adapter_in_model

    if targets == ALL_LINEAR:
        # By name, because PEFT's list includes stacks of experts, whose adapters do not run on the meta device.
        targets = find_default_targets(model).names
    targets = targets if isinstance(targets, str) else list(targets)
    with torch.device("meta"):
        lora = LoraConfig(r=rank, target_modules=targets)
        check_patterns(lora, [name for name, _ in model.named_modules()])
        inject_adapter_in_model(lora, model)
    for parameter in model.parameters():
        # Adapters compute from a copy in the dtype of the base (fused/low_precision_adapters.py).
        if parameter.requires_grad:
            parameter.data = parameter.data.to(model.dtype)


def _quantised_weights(model: nn.Module, *, skipped: nn.Module | None) -> list[torch.Tensor]:
    """Return the weights that quantization="nf4" stores in 4 bits: linear layers except the head, and expert stacks."""
    linear = [module.weight for module in model.modules() if isinstance(module, nn.Linear) and module is not skipped]
    return [*linear, *(module.get_parameter(name) for module, name in check_experts(model))]


class _ByteCounter:
    """Count the device memory of parameters: weights, and for trained ones gradients and optimizer state.

    Args:
        quantized: Weights stored in NF4.
        has_adapters: Whether trained parameters are adapters: an fp32 master, its gradient and moments, and a copy in
            the compute dtype.
        has_masters: Whether other trained parameters have an fp32 master and moments beside a weight and gradient in
            the compute dtype; otherwise moments have the dtype of the weights.
    """

    def __init__(self, quantized: Sequence[torch.Tensor], *, has_adapters: bool, has_masters: bool) -> None:
        self._quantized = {id(tensor) for tensor in quantized}
        self._has_adapters, self._has_masters = has_adapters, has_masters
        # The optimizer reports its device memory per parameter.
        self.state_bytes: Callable[[nn.Parameter], int] | None = None

    def all(self, parameters: Any) -> int:
        """Return the bytes of all these parameters, each counted once."""
        return sum(map(self._of, {id(parameter): parameter for parameter in parameters}.values()))

    def frozen(self, layer: nn.Module) -> int:
        """Return the bytes of a layer's frozen weights."""
        return sum(self._of(parameter) for parameter in layer.parameters() if not parameter.requires_grad)

    def _of(self, parameter: nn.Parameter) -> int:
        if id(parameter) in self._quantized:
            return int(parameter.numel() * NF4_BYTES_PER_WEIGHT)
        if not parameter.requires_grad:
            return parameter.numel() * parameter.element_size()
        size = parameter.element_size()
        if self._has_adapters:
            return parameter.numel() * (_MASTER_BYTES + size)
        if self.state_bytes is not None:
            return parameter.numel() * 2 * size + self.state_bytes(parameter)
        return parameter.numel() * (_WHOLE_MASTER_BYTES + 2 * size if self._has_masters else 4 * size)


class _Call(NamedTuple):
    """Arguments with which the model calls a layer."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def _record_calls(model: PreTrainedModel, layers: Sequence[nn.Module], *, num_tokens: int) -> list[_Call]:
    """Run the decoder once on the meta device and return the arguments of each layer."""
    calls: list[_Call] = []
    hooks = [
        layer.register_forward_pre_hook(lambda _, args, kwargs: calls.append(_Call(args, kwargs)), with_kwargs=True)
        for layer in layers
    ]
    token_T = torch.zeros(1, num_tokens, dtype=torch.long, device="meta")
    try:
        with torch.no_grad():
            model.get_decoder()(input_ids=token_T, attention_mask=torch.ones_like(token_T), use_cache=False)
    except (NotImplementedError, RuntimeError) as error:
        raise UnsupportedModelError(
            f"{type(model).__name__} does not run on the meta device, so its costs are not known without a GPU: "
            f"{error}. Adapters on experts are one cause: set target_modules to the projections of attention, or plan "
            "on the GPU, where the first steps are measured."
        ) from error
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def _kind(layer: nn.Module) -> tuple[Any, ...]:
    """Return a key that is equal for layers of equal cost: modules, shapes and attention window."""
    modules = tuple((name, type(module).__name__) for name, module in layer.named_modules())
    shapes = tuple(
        (name, tuple(parameter.shape), parameter.requires_grad) for name, parameter in layer.named_parameters()
    )
    return modules, shapes, _window(layer)


def _window(layer: nn.Module) -> int | None:
    """Return the attention window of a layer that has run, in keys per query."""
    return next(
        (vars(module)[WINDOW_ATTRIBUTE] for module in layer.modules() if WINDOW_ATTRIBUTE in vars(module)), None
    )


def _measure_layer(layer: nn.Module, call: _Call, meter: Meter, bytes_of: _ByteCounter) -> SegmentCost:
    """Run a layer without gradients, then forward and backward, and read the meter."""
    hidden, *others = call.args
    meter.limit_window(_window(layer))
    for parameter in layer.parameters():
        if parameter.requires_grad:
            # Gradients count as resident memory.
            parameter.grad = torch.empty_like(parameter)
            meter.ignore(parameter.grad)
    entry = hidden.detach().requires_grad_()
    meter.ignore(entry)
    with meter:
        with torch.no_grad():
            start_bytes, start = meter.start_peak(), meter.read()
            layer(hidden, *others, **call.kwargs)
            forward = meter.read().since(start)
            forward_peak = meter.peak_bytes - start_bytes
        record = _LayerRecord(layer, meter)
        held_bytes, start = meter.start_peak(), meter.read()
        with record, torch.autograd.graph.saved_tensors_hooks(record.pack, lambda tensor: tensor):
            out = layer(entry, *others, **call.kwargs)
        out = out[0] if isinstance(out, tuple) else out
        saved_bytes = meter.start_peak() - held_bytes - out.numel() * out.element_size()
        middle_bytes, middle = meter.live_bytes, meter.read()
        torch.autograd.backward(out, torch.empty_like(out))
        backward = meter.read().since(middle)
        backward_peak = meter.peak_bytes - middle_bytes
    for parameter in layer.parameters():
        parameter.grad = None
    values, unneeded = record.values(forward)
    replay = record.last_pack.since(start)
    return SegmentCost(
        input_bytes=hidden.numel() * hidden.element_size(),
        saved_bytes=max(0, saved_bytes),
        forward_ms=forward.ms(),
        backward_ms=backward.ms(),
        recompute_ms=max(replay.ms() - unneeded.ms(), sum(value.rebuild_ms for value in values)),
        values=values,
        forward_peak_bytes=forward_peak,
        backward_peak_bytes=backward_peak,
        weight_bytes=bytes_of.frozen(layer),
    )


class _LayerRecord:
    """Record meter readings at the linear layers, the attention and the last saved tensor of a running layer."""

    def __init__(self, layer: nn.Module, meter: Meter) -> None:
        self.last_pack = meter.read()
        self._meter = meter
        self._done: list[tuple[str, Reading, int]] = []
        self._starts: dict[str, Reading] = {}
        self._num_packs = 0
        self._packs_at_last_end = 0
        self._hooks: list[Any] = []
        self._layer = layer

    def __enter__(self) -> None:
        self._meter.on_attention = lambda before, after, num_bytes: self._note(
            ATTENTION_VALUE, after.since(before), num_bytes
        )
        for name, module in self._layer.named_modules():
            if isinstance(module, nn.Linear) and "lora_" not in name:
                self._hooks.append(module.register_forward_pre_hook(lambda *_, name=name: self._begin(name)))
                self._hooks.append(
                    module.register_forward_hook(lambda _module, _args, out, name=name: self._end(name, out))
                )
            if hasattr(module, "base_layer"):
                self._hooks.append(module.register_forward_hook(lambda *_: self._note_end()))

    def __exit__(self, *_: object) -> None:
        self._meter.on_attention = None
        for hook in self._hooks:
            hook.remove()

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """Record that a tensor is saved for the backward."""
        self._num_packs += 1
        self.last_pack = self._meter.read()
        return tensor

    def values(self, forward: Reading) -> tuple[tuple[ValueCost, ...], Reading]:
        """Return the values that can be held, in order, and the time of a last product that no backward needs."""
        done, unneeded = self._done, Reading(0.0, 0)
        if done and self._num_packs == self._packs_at_last_end:
            # Nothing was saved after the last linear layer, so a recompute skips it.
            *done, (_, unneeded, _) = done
        is_host_bound = forward.ms() > forward.device_ms
        values = [
            ValueCost(name.removesuffix(_BASE_SUFFIX), size, taken.ms() if is_host_bound else taken.device_ms)
            for name, taken, size in done
        ]
        return tuple(values), unneeded

    def _begin(self, name: str) -> None:
        self._starts[name] = self._meter.read()

    def _end(self, name: str, out: torch.Tensor) -> None:
        self._note(name, self._meter.read().since(self._starts[name]), out.numel() * out.element_size())
        self._note_end()

    def _note_end(self) -> None:
        self._packs_at_last_end = self._num_packs

    def _note(self, name: str, taken: Reading, num_bytes: int) -> None:
        self._done.append((name, taken, num_bytes))


def _head_cost(model: PreTrainedModel, *, num_tokens: int, machine: Gpu, dtype: torch.dtype) -> tuple[int, float]:
    """Return transient bytes and time of the final norm, the chunked head and the loss, forward and backward."""
    weight = model.get_output_embeddings().weight
    vocab_size, width = weight.shape
    num_products = 2 + weight.requires_grad
    flops = 2.0 * num_products * vocab_size * width * num_tokens
    # Last hidden states, their norm and its fp32 copy, their gradient, and one chunk of logits, which its gradient
    # overwrites.
    states_bytes = num_tokens * width * (4 * dtype.itemsize + 4)
    chunk_bytes = min(num_tokens, DEFAULT_CHUNK_ROWS) * vocab_size * dtype.itemsize
    gradient_bytes = 4 * vocab_size * width if weight.requires_grad else 0
    # The loss reads and writes the logits once.
    loss_ms = 2.0 * num_tokens * vocab_size * dtype.itemsize / machine.reached_bytes_per_s * 1e3
    return states_bytes + chunk_bytes + gradient_bytes, flops / machine.sustained_flops_per_s * 1e3 + loss_ms
