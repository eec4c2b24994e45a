"""Keep a run within its budget of device memory: plan the first steps from shapes, and watch the later ones."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import nn

from lightning_fastft.activations.budgets import SEGMENT_BYTES
from lightning_fastft.activations.probe import Meter
from lightning_fastft.activations.segments import KEEP
from lightning_fastft.activations.slots import align
from lightning_fastft.activations.tiles import dense_blocks
from lightning_fastft.core.errors import OptionError
from lightning_fastft.kernels.logit_rows import chunk_rows_of
from lightning_fastft.planner.prediction import StepModel
from lightning_fastft.planner.step import EndBytes, Machine, SegmentCost, SegmentPlan, StepCost, uniform_plan

# Memory that a transformers layer with PEFT saves for its backward, per output byte of its linear layers: 2.7 measured
# for an 8B model.
_SAVED_PER_OUTPUT = 3
# Layers that save less have their own number in this attribute.
SAVED_ATTRIBUTE = "_fastft_saved_per_output"
# Hidden states between linear layers: norms, residuals, their copies.
_HIDDEN_PER_LAYER = 4
# Upper bound of the experts per token.
_EXPERTS_PER_TOKEN = 8
# Predicted memory does not depend on the speed of the machine.
_ANY_MACHINE = Machine("any", 1.0, 1.0)
# Share of the memory that a plan may use, of the budget at first and of its predecessor's memory later.
PLANNED_SHARE = 0.95
# Steps watched after each plan, and the maximum number of new plans.
_WATCHED_STEPS = 3
_MAX_CORRECTIONS = 3


class BudgetWatch:
    """Detect steps that reach the limit of the allocator, which then syncs with the device and frees its cache."""

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self._num_steps = self._num_retries = self._num_corrections = 0

    def lowered_bytes(self, peak_bytes: int, meter: Meter) -> int | None:
        """Return the memory for the next plan if steps of this one are at the limit; None to keep it.

        Call it before each step.

        Cost:
            Reads the allocator's statistics in the first steps of a plan; no host sync.
        """
        if self._num_steps > _WATCHED_STEPS:
            return None
        num_before, self._num_retries = self._num_retries, meter.num_retries()
        self._num_steps += 1
        # The first step still frees memory of the measured steps.
        is_pressed = self._num_retries > num_before or meter.reserved() > self._budget_bytes
        if self._num_steps == 1 or not is_pressed or self._num_corrections == _MAX_CORRECTIONS:
            return None
        self._num_corrections += 1
        self._num_steps = 0
        return int(peak_bytes * PLANNED_SHARE)

    def stop(self) -> None:
        """Watch no further step."""
        self._num_corrections = _MAX_CORRECTIONS


class HeadSizes(NamedTuple):
    """Sizes of a model outside of its decoder layers, from which the memory of a step is predicted.

    Args:
        vocab_size: Columns of the logits; 0 if unknown.
        trained: Trained weights whose gradients exist during the backward of the layers.
        sum_bytes: The sum over chunks of a trained output layer's gradient, in fp32.
    """

    vocab_size: int = 0
    trained: tuple[nn.Parameter, ...] = ()
    sum_bytes: int = 0


class FirstPlan(NamedTuple):
    """Plan of the first steps.

    Args:
        segments: Treatment of each segment: recompute, with inputs on the device or on the host.
        is_streamed: Whether frozen weights are streamed.
        peak_bytes: Predicted peak, an upper bound.
    """

    segments: tuple[SegmentPlan, ...]
    is_streamed: bool
    peak_bytes: int

    def describe(self) -> str:
        """Return where inputs and frozen weights are, as a clause."""
        place = "the host" if any(segment.input_place == "host" for segment in self.segments) else "the device"
        return f"with layer inputs on {place}{' and streamed weights' if self.is_streamed else ''}"


def predict_cost(
    layers: Sequence[nn.Module],
    hidden: torch.Tensor,
    *,
    longest_bytes: int,
    base_bytes: int,
    head: HeadSizes,
    weight_bytes: Sequence[int],
    ends: EndBytes,
    mlp_tiles: int = 1,
) -> StepCost:
    """Return the memory of a step as predicted from shapes, without times; peaks are upper bounds.

    Args:
        layers: Decoder layers, in order.
        hidden: Hidden states of a pack; only width and dtype are read.
        longest_bytes: Size of the hidden states of the longest pack.
        base_bytes: Memory in use throughout: all weights, but no gradients that are not allocated yet.
        head: Sizes outside of the layers.
        weight_bytes: Size of the frozen weights of each layer.
        ends: Sizes of the ends of the model that move with streamed weights.
        mlp_tiles: Tiles of tokens in which dense feed-forward blocks run.
    """
    width, element_size = hidden.shape[-1], hidden.element_size()
    num_tokens = longest_bytes // (width * element_size)
    weights = (*head.trained, *(parameter for layer in layers for parameter in layer.parameters()))
    base_bytes += sum(weight.nbytes for weight in weights if weight.requires_grad and weight.grad is None)
    segments = []
    for layer, num_weight_bytes in zip(layers, weight_bytes):
        out_bytes = num_tokens * element_size * (_output_width(layer, mlp_tiles) + _HIDDEN_PER_LAYER * width)
        sizes = align(longest_bytes), int(vars(layer).get(SAVED_ATTRIBUTE, _SAVED_PER_OUTPUT) * out_bytes)
        segments.append(SegmentCost(*sizes, 0.0, 0.0, 0.0, (), out_bytes, out_bytes, num_weight_bytes))
    # Last hidden states, norm, gradient and an fp32 copy; one chunk of logits.
    logit_bytes = min(num_tokens, chunk_rows_of(width)) * head.vocab_size * element_size
    head_bytes = num_tokens * width * (4 * element_size + 4) + logit_bytes + head.sum_bytes
    return StepCost(tuple(segments), base_bytes, head_bytes, 0.0, 0.0, ends)


def choose_first_plan(
    cost: StepCost,
    *,
    counted: set[int],
    vram_budget_bytes: int,
    host_budget_bytes: int,
    buffers: int,
    streaming: Sequence[bool],
) -> FirstPlan:
    """Return the first plan that is predicted to fit, else the one with the least peak.

    Inputs stay on the device, or go to the host, or weights are streamed too. streaming lists whether frozen weights
    may be streamed, best first.
    """
    found = list(_plans(cost, counted, host_budget_bytes=host_budget_bytes, buffers=buffers, streaming=streaming))
    fitting = (plan for plan in found if plan.peak_bytes <= vram_budget_bytes)
    return next(fitting, min(found, key=lambda plan: plan.peak_bytes))


def least_peak_bytes(cost: StepCost, *, host_budget_bytes: int, buffers: int, streaming: Sequence[bool]) -> int:
    """Return the least peak of the plans that recompute everything; arguments as in ``choose_first_plan``."""
    found = _plans(cost, set(), host_budget_bytes=host_budget_bytes, buffers=buffers, streaming=streaming)
    return min(plan.peak_bytes for plan in found)


def budget_for(peak_bytes: int) -> int:
    """Return the least budget with room for a plan of this peak, the margin of plans included."""
    # One byte more, for the rounding of both.
    return math.ceil(peak_bytes / PLANNED_SHARE) + SEGMENT_BYTES + 1


def check_feasible(
    cost: StepCost,
    layers: Sequence[nn.Module],
    *,
    column_bytes: int,
    vram_budget_bytes: int,
    host_budget_bytes: int,
    buffers: int,
    streaming: Sequence[bool],
) -> None:
    """Refuse a budget that no step can keep, before the first one runs.

    The check counts only memory that every backward needs: the outputs of a layer's linear modules once, without
    temporary memory. A budget between this bound and the prediction is tried, because predicted peaks are upper bounds.
    column_bytes is the size of one value of each token that a layer computes at a time.

    Raises:
        OptionError: No step can keep the budget; the message has the memory of the leanest plan.
    """
    segments = tuple(
        segment._replace(saved_bytes=column_bytes * _linear_width(layer), forward_peak_bytes=0, backward_peak_bytes=0)
        for segment, layer in zip(cost.segments, layers)
    )
    certain = cost._replace(segments=segments, head_peak_bytes=0)
    least_of = functools.partial(
        least_peak_bytes, host_budget_bytes=host_budget_bytes, buffers=buffers, streaming=streaming
    )
    if least_of(certain) > vram_budget_bytes:
        least = budget_for(least_of(cost))
        raise OptionError(
            f"vram_budget is {vram_budget_bytes / 2**30:.2f} GiB, and the leanest plan for this model and these packs "
            f"takes about {least / 2**30:.2f} GiB. Raise vram_budget, or use a smaller max_tokens."
        )


def _plans(
    cost: StepCost, counted: set[int], *, host_budget_bytes: int, buffers: int, streaming: Sequence[bool]
) -> Iterator[FirstPlan]:
    """Yield the plans whose host memory suffices; at least the first one."""
    model = StepModel(cost, machine=_ANY_MACHINE, buffers=buffers)
    for number, is_streamed in enumerate(streaming):
        for kind in ("recompute", "offload"):
            plan = uniform_plan(len(cost.segments), kind)
            streamed = [segment._replace(is_streamed=is_streamed) for segment in plan]
            kept = [
                KEEP._replace(is_streamed=is_streamed) if index in counted else segment
                for index, segment in enumerate(streamed)
            ]
            lean = model.footprint(streamed)
            if lean.host_bytes <= host_budget_bytes or (number == 0 and kind == "recompute"):
                yield FirstPlan(plan, is_streamed, max(lean.peak_bytes, model.footprint(kept).peak_bytes))


def _output_width(layer: nn.Module, mlp_tiles: int) -> int:
    """Return the output values per token of the linear layers and expert stacks of a decoder layer, those of dense
    feed-forward blocks in one tile.
    """
    in_tiles = sum(map(_linear_width, dense_blocks(layer).values()))
    return (
        _linear_width(layer)
        - in_tiles
        + in_tiles // mlp_tiles
        + sum(
            min(parameter.shape[0], _EXPERTS_PER_TOKEN) * max(parameter.shape[1:])
            for name, parameter in layer.named_parameters()
            if parameter.ndim == 3 and "lora_" not in name
        )
    )


def _linear_width(layer: nn.Module) -> int:
    """Return the output values per token of the linear layers of a decoder layer, without adapters."""
    return sum(
        module.out_features
        for name, module in layer.named_modules()
        if isinstance(module, nn.Linear) and "lora_" not in name
    )
