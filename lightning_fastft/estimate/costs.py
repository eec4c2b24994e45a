"""Estimate the cost of a training step on a GPU from its published rates.

The layers of the run itself, patched as in the run, take one step on the meta device. So neither weights nor a GPU are
needed, and what a layer saves and launches is counted, not modelled.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer
from transformers import PretrainedConfig, PreTrainedModel

from lightning_fastft.activations.budgets import AUTO_VRAM_SHARE
from lightning_fastft.activations.checkpointing import OffloadCheckpointing
from lightning_fastft.activations.frozen_weights import frozen_bytes
from lightning_fastft.activations.probe import SavedBytesProbe, StepProbe
from lightning_fastft.activations.segments import KEEP, RECOMPUTE, Segment, SegmentObserver
from lightning_fastft.activations.slots import align
from lightning_fastft.activations.vram_budget import PLANNED_SHARE
from lightning_fastft.core.checks import check_choice, check_float, check_int, check_share
from lightning_fastft.core.errors import OptionError, UnsupportedModelError
from lightning_fastft.core.patcher import ModelPatcher
from lightning_fastft.estimate.machines import Gpu
from lightning_fastft.estimate.meta_model import (
    Swaps,
    add_adapters_on_meta,
    build_on_meta,
    first_layers,
    install_as_in_a_run,
    make_batch,
    quantise_on_meta,
)
from lightning_fastft.estimate.metering import Meter, MeteredDevice
from lightning_fastft.estimate.optimizer_cost import OptimizerCost, meter_optimizer
from lightning_fastft.fused.fp8_base import FP8_ATTRIBUTE
from lightning_fastft.fused.low_precision_adapters import copies_in
from lightning_fastft.hf.embeddings import find_token_parameters
from lightning_fastft.hf.families import decoder_layers
from lightning_fastft.hf.loading.source import ModelSource
from lightning_fastft.moe.fp8_experts import held_memory
from lightning_fastft.packing.collate import PackedBatch
from lightning_fastft.patches.host_ends import movable_bytes
from lightning_fastft.planner.plan import make_plan, plan_policy
from lightning_fastft.planner.step import EndBytes, Plan, SegmentCost, SegmentPlan, StepCost, ValueCost

if TYPE_CHECKING:
    from peft import LoraConfig

# Host time per kernel, Python included, of transformers' layers and of fused ones, which launch fewer: fitted to
# Qwen3-0.6B LoRA, all kept, which is launch-bound. 265 ms, 37 of them in the optimizer; and 170 ms, the 209 ms of fused
# layers (mean of two rows) on the same host times 190 / 234: one H100 took 234 ms a step before, and 190 ms now.
# That code launched 15 % more kernels than this one, whose step is predicted at 148 ms. Another host may be several
# times faster.
_HOST_MS_PER_KERNEL, _HOST_MS_FUSED = 0.0391, 0.0978


class MeteredStep(NamedTuple):
    """A step that ran on the meta device; its kernels have a time on any GPU.

    Args:
        layers: The layers that ran.
        places: For each decoder layer, the place in ``layers`` of one of equal cost.
        weight_bytes: Frozen weights of each decoder layer.
        held_bytes: Weights, what layers hold beside them, gradients and optimizer.
        buffer_bytes: Buffers of the model.
        optimizer: Costs of the optimizer's step.
        ends: As in ``StepCost``.
        is_graphed: ``Swaps.is_graphed``.
        has_reference_pass: As in ``meter_step``.
    """

    layers: _MeteredLayers
    places: list[int]
    weight_bytes: list[int]
    held_bytes: int
    buffer_bytes: int
    optimizer: OptimizerCost
    ends: EndBytes
    is_graphed: bool | str
    has_reference_pass: bool

    def costs_on(self, machine: Gpu) -> StepCost:
        """Return the estimated cost of the step on a GPU, layer by layer."""
        cost, is_graphed = self.layers.costs_on(machine, places=self.places, is_graphed=self.is_graphed)
        segments = tuple(
            segment._replace(weight_bytes=num_bytes) for segment, num_bytes in zip(cost.segments, self.weight_bytes)
        )
        # The head's forward has a third of its products.
        reference_ms = sum(segment.forward_ms for segment in segments) + cost.head_ms / 3
        shared_bytes = cost.base_bytes + self.buffer_bytes
        if is_graphed:
            shared_bytes += _graph_bytes(segments, head_peak_bytes=cost.head_peak_bytes)
        return cost._replace(
            segments=segments,
            base_bytes=shared_bytes + self.held_bytes,
            head_ms=cost.head_ms + (reference_ms if self.has_reference_pass else 0.0),
            other_ms=self.optimizer.ms_on(machine),
            ends=self.ends,
            shared_bytes=shared_bytes,
            update_peak_bytes=self.optimizer.peak_bytes,
        )


def model_costs(
    model: PreTrainedModel | PretrainedConfig | Mapping[str, Any] | ModelSource, *, machine: Gpu, **options: Any
) -> StepCost:
    """Return the estimated cost of a step over one pack on a GPU, layer by layer.

    Arguments, errors and cost are those of ``meter_step``.
    """
    return meter_step(model, **options).costs_on(machine)


def meter_step(
    model: PreTrainedModel | PretrainedConfig | Mapping[str, Any] | ModelSource,
    *,
    num_tokens: int,
    mean_document_tokens: float,
    quantization: Literal["nf4"] | None = None,
    lora: LoraConfig | int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    has_masters: bool = False,
    optimizer: Callable[[list[nn.Parameter]], Optimizer] | None = None,
    swaps: Swaps | None = None,
    label_share: float = 1.0,
    has_reference_pass: bool = False,
) -> MeteredStep:
    """Run a step over one pack on the meta device.

    The first decoder layers, as many as there are kinds, run as in a run, under the probes of its first steps. Times of
    kernels follow from the published rates of a GPU, times the shares of these that an H200 reaches.

    Args:
        model: A configuration, or a transformers model on the meta device, to which adapters are added.
        num_tokens: Tokens of a pack; under context parallelism, of the share of one GPU.
        mean_document_tokens: Length of the whole document of a token, averaged over tokens.
        quantization: "nf4" stores the weights of all linear layers except the head in NF4.
        lora: Adapters of a frozen base, or the rank of adapters on every linear layer; None trains every weight.
        dtype: Dtype of weights and arithmetic.
        has_masters: Whether fp32 masters of trained weights are held beside weights of lower precision.
        optimizer: As in ``meter_optimizer``; None for AdamW with moments in fp32 (of adapters and masters) or in the
            dtype of the weights.
        swaps: Callbacks of the run; None for the default ones of ``Swaps``.
        label_share: Share of the tokens that is labelled; the head computes only these.
        has_reference_pass: Whether the step also runs the pack forward without adapters, for a reference.

    Raises:
        UnsupportedModelError: A layer does not run on the meta device.
        MissingDependencyError: quantization is "nf4", a layer is not fused, and bitsandbytes is not installed.

    Cost:
        Some seconds on the host; no weights and no device are needed.

    Source:
        own; shares in estimate/metering.py.
    """
    check_int("num_tokens", num_tokens, low=1)
    check_float("mean_document_tokens", mean_document_tokens, low=1.0)
    check_choice("quantization", quantization, (None, "nf4"))
    check_share("label_share", label_share)
    swaps = swaps or Swaps()
    base = model if isinstance(model, PreTrainedModel) else build_on_meta(model, dtype=dtype)
    if quantization:
        quantise_on_meta(base, dtype=dtype)
    if lora is not None:
        add_adapters_on_meta(base, lora)
    layers = decoder_layers(base)
    batch = make_batch(num_tokens, document_tokens=mean_document_tokens, label_share=label_share)
    with first_layers(base) as places:
        metered = _meter_layers(base, batch, document_tokens=mean_document_tokens, swaps=swaps)
    trained = [parameter for parameter in base.parameters() if parameter.requires_grad]
    # Adapters and masters have moments in fp32, other weights in their dtype.
    per_weight = 8 if lora is not None else 12 if has_masters else 2 * dtype.itemsize
    update = meter_optimizer(
        optimizer,
        trained,
        default_state_bytes=per_weight * sum(parameter.numel() for parameter in trained),
        of_tokens=find_token_parameters(base),
    )
    held_bytes = sum(metered.held_bytes[place] for place in places) + sum(map(_num_bytes, _weights_of(base)))
    # Lightning frees the gradients of a step between the forward and the backward of the next one.
    held_bytes += sum(map(_num_bytes, trained)) + update.state_bytes
    return MeteredStep(
        metered,
        places,
        weight_bytes=[frozen_bytes(layer) for layer in layers],
        held_bytes=held_bytes,
        buffer_bytes=sum(map(_num_bytes, base.buffers())),
        optimizer=update,
        ends=movable_bytes(base),
        is_graphed=swaps.is_graphed,
        has_reference_pass=has_reference_pass,
    )


def default_vram_bytes(gpu: Gpu, cost: StepCost) -> int:
    """Return the device memory that a run takes by default: what is resident, and most of the rest.

    A GPU too small for the resident bytes gives all of its memory, for streamed weights.
    """
    resident_bytes = min(cost.base_bytes, gpu.memory_bytes)
    return resident_bytes + int(AUTO_VRAM_SHARE * (gpu.memory_bytes - resident_bytes))


def plan_on(
    gpu: Gpu,
    cost: StepCost,
    *,
    vram_budget_bytes: int | None,
    host_budget_bytes: int,
    policy: str = "auto",
    **options: Any,
) -> Plan:
    """Return the plan that a run makes on a GPU.

    Args:
        gpu: The GPU.
        cost: Of the step on it.
        vram_budget_bytes: The ``vram_budget`` of the run, of which it plans 95 %, or all if nothing fits 95 %; None for
            ``default_vram_bytes``.
        host_budget_bytes: As in ``make_plan``.
        policy: Of ``OffloadCheckpointing``; other policies than "auto" have all memory of the GPU.
        options: Other options of ``make_plan``.

    Raises:
        OptionError: As ``make_plan`` and ``plan_policy``.
    """
    options |= {"host_budget_bytes": host_budget_bytes, "machine": gpu.machine}
    if policy != "auto":
        return plan_policy(cost, policy, vram_budget_bytes=gpu.memory_bytes, **options)
    if vram_budget_bytes is None:
        return make_plan(cost, vram_budget_bytes=default_vram_bytes(gpu, cost), **options)
    try:
        return make_plan(cost, vram_budget_bytes=int(PLANNED_SHARE * vram_budget_bytes), **options)
    except OptionError:
        return make_plan(cost, vram_budget_bytes=vram_budget_bytes, **options)


class _MeteredLayers(NamedTuple):
    """The layers that ran on the meta device.

    Args:
        device: Clock of the kernels that ran.
        read: Returns the costs of the layers by this clock.
        held_bytes: Memory that each layer holds beside its weights.
        gradient_bytes: Gradients of each layer.
        is_fused: Whether layers are fused.
        host_ms: Host time per kernel.
    """

    device: MeteredDevice
    read: Callable[[], StepCost]
    held_bytes: list[int]
    gradient_bytes: list[int]
    is_fused: bool
    host_ms: float

    def costs_on(self, machine: Gpu, *, places: Sequence[int], is_graphed: bool | str) -> tuple[StepCost, bool]:
        """Return the costs of a step without the memory of weights and optimizer, and whether layers run from graphs.

        Args:
            machine: The GPU.
            places: For each decoder layer, the place of the one that ran for it.
            is_graphed: ``Swaps.is_graphed``.
        """
        self.device.ms_of = lambda kernel: kernel.ms_on(machine)
        cost = self.read()
        # The same step by the kernels that the host launches; layers from graphs need none.
        self.device.ms_of = lambda kernel: self.host_ms
        host = self.read()
        # The meter sees the end of the first layer, which the probe does not.
        first = cost.segments[0]
        first = first._replace(backward_ms=first.backward_ms + cost.other_ms)
        # Gradients count as resident.
        segments = [
            segment._replace(backward_peak_bytes=max(0, segment.backward_peak_bytes - num_bytes))
            for segment, num_bytes in zip((first, *cost.segments[1:]), self.gradient_bytes)
        ]
        cost = cost._replace(segments=tuple(segments[place] for place in places), other_ms=0.0)
        host = host._replace(segments=tuple(host.segments[place] for place in places))
        # No step waits for the device, so the slower one of device and host sets the time of the whole step.
        is_launch_bound = host.head_ms + host.layers_ms > cost.head_ms + cost.layers_ms
        if self.is_fused and (is_launch_bound if is_graphed == "auto" else is_graphed):
            return cost, True
        if is_launch_bound:
            launched = tuple(_launched(*pair) for pair in zip(cost.segments, host.segments))
            cost = cost._replace(segments=launched, head_ms=host.head_ms)
        return cost, False


def _meter_layers(
    model: PreTrainedModel, batch: PackedBatch, *, document_tokens: float, swaps: Swaps
) -> _MeteredLayers:
    """Install what a run installs, keep and then recompute every layer on the meta device, under the probes."""
    patcher, checkpointing = ModelPatcher(), OffloadCheckpointing("recompute", mlp_tiles=swaps.mlp_tiles)
    try:
        is_fused = install_as_in_a_run(model, patcher, checkpointing, swaps=swaps)
        segments, layers = checkpointing.last_segments(), decoder_layers(model)
        meter = Meter(document_tokens=document_tokens, resident=[*_weights_of(model), *model.buffers()])
        device = MeteredDevice(meter)
        saved, step = SavedBytesProbe(device), StepProbe(device)
        with meter:
            # The first step makes what stays, and finds the value point at which a recompute ends.
            for observer, plan in ((None, RECOMPUTE), (saved, KEEP), (step, RECOMPUTE)):
                _observe(segments, observer, plan=plan)
                loss = model(**batch).loss
                if observer is not saved:
                    loss.backward()
                del loss
                model.zero_grad()
                # Counted by layer, because only the first layers run.
                meter.add_resident(tensor for layer in layers for tensor in _held_tensors(layer))
            step.step_ends()
        held_bytes = [sum(map(_num_bytes, _held_tensors(layer))) for layer in layers]
        gradient_bytes = [
            sum(_num_bytes(parameter) for parameter in layer.parameters() if parameter.requires_grad)
            for layer in layers
        ]
    except (NotImplementedError, RuntimeError) as error:
        raise UnsupportedModelError(
            f"{type(model).__name__} does not run on the meta device, so its costs are not known without a GPU: "
            f"{str(error).rstrip('.')}. Plan on the GPU, where the first steps are measured."
        ) from error
    finally:
        for parameter in model.parameters():
            parameter.grad = None
        patcher.undo()
    width = model.config.get_text_config(decoder=True).hidden_size
    read = functools.partial(
        step.read,
        segments,
        input_bytes=align(batch.context.num_tokens * width * model.dtype.itemsize),
        saved_bytes=[saved.saved_bytes[segment.index] for segment in segments],
        extra_bytes=0,
        weight_bytes=[0] * len(segments),
    )
    # Blocks in tiles run as modules, which launch most of the kernels then.
    host_ms = _HOST_MS_FUSED if is_fused and swaps.mlp_tiles == 1 else _HOST_MS_PER_KERNEL
    return _MeteredLayers(device, read, held_bytes, gradient_bytes, is_fused, host_ms)


def _observe(segments: Sequence[Segment], observer: SegmentObserver | None, *, plan: SegmentPlan) -> None:
    for segment in segments:
        segment.plan, segment.observer = plan, observer


def _launched(device: SegmentCost, host: SegmentCost) -> SegmentCost:
    """Return the costs of a layer in a step that takes as long as its launches."""
    values = tuple(
        ValueCost(value.name, value.num_bytes, max(value.rebuild_ms, other.rebuild_ms))
        if host.recompute_ms > device.recompute_ms
        else value
        for value, other in zip(device.values, host.values)
    )
    return device._replace(
        forward_ms=host.forward_ms,
        backward_ms=host.backward_ms,
        recompute_ms=max(device.recompute_ms, host.recompute_ms),
        values=values,
    )


def _weights_of(model: nn.Module) -> Iterator[torch.Tensor]:
    """Yield the parameters of a model, each once; the tensors of a quantised weight one by one."""
    for parameter in model.parameters():
        state, stack = getattr(parameter, "quant_state", None), getattr(parameter, "stack", None)
        if stack is not None:
            yield from stack
            continue
        yield parameter
        if state is not None:
            yield from (state.absmax, state.code, state.offset, state.state2.absmax, state.state2.code)


def _graph_bytes(segments: Sequence[SegmentCost], *, head_peak_bytes: int) -> int:
    """Return the memory that graphs of layers hold beside a plan: the output of each layer, and temporary memory that
    their pool keeps, so that forward, backward and head do not share it.
    """
    outputs = sum(segment.input_bytes for segment in segments)
    forward = max(segment.forward_peak_bytes for segment in segments)
    return outputs + forward + max(segment.backward_peak_bytes for segment in segments) + head_peak_bytes


def _held_tensors(layer: nn.Module) -> list[torch.Tensor]:
    """Return what a layer holds beside its weights: low-precision copies of adapters, and weights in fp8."""
    weights = vars(layer).get(FP8_ATTRIBUTE, ())
    return [*copies_in(layer), *(tensor for weight in weights for tensor in weight.memory()), *held_memory(layer)]


def _num_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
