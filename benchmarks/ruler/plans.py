"""Activation policies by mode name, the record of a plan, and the check of the gradients of a step under a plan."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Callback, Trainer

from benchmarks.ruler import judge as judging
from lightning_fastft.activations.checkpointing import OffloadCheckpointing
from lightning_fastft.activations.segments import RECOMPUTE
from lightning_fastft.activations.stack import SegmentStack
from lightning_fastft.callbacks.fused_kernels import FusedKernels
from lightning_fastft.graphs.layer_graphs import GRAPH_ATTRIBUTE
from lightning_fastft.packing.collate import PackedBatch
from lightning_fastft.strategies.single_device import FastFTStrategy
from lightning_fastft.training.fine_tuner import FineTuner
from tests.support.engine_use import describe_use

# The config that the package ships for a workload, and what it runs.
SHIPPED, SHIPPED_MODE = "shipped", "auto+graphs=auto"
# A machine that grows its memory as it is touched tells little about what it could give, so modes name their host
# budget.
DEFAULT_HOST_GIB = 48.0
POLICIES: dict[str, dict[str, Any]] = {
    "keep": {"policy": "keep"},
    "recompute": {"policy": "recompute"},
    "offload": {"policy": "offload", "buffers": 2},
    "offload1": {"policy": "offload", "buffers": 1},
    "auto": {"policy": "auto"},
}
# The first forward that follows the plan of "auto" is that of this step, counted from 0; what it does to memory is over
# two steps later.
FIRST_PLANNED_STEP = 3
CHECKED_STEP = FIRST_PLANNED_STEP + 1
LEAST_AUTO_WARMUP = CHECKED_STEP + 3
# Layers are recorded in the third step that follows a plan, after two that are watched where the host's pace decides.
GRAPHS_CHECKED_STEP = CHECKED_STEP + 4
# By then every kind of pack of the ruler's token files has been recorded: what a recording takes is paid once a run,
# not in its steps.
_GRAPHS_WARMUP = 16
_ADDED = ("liger", "fused", "graphs", "graphs=auto", "fp8", "stream", "resident", "ragged")
_GIB = 2**30
_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


class Mode(NamedTuple):
    """What a mode asks for: an activation policy, Liger's layers, our fused layers, those from CUDA graphs, and
    those with fp8 products.
    """

    checkpointing: OffloadCheckpointing
    wants_liger: bool
    wants_fused: bool
    wants_graphs: bool | str = False
    wants_fp8: bool = False

    def callbacks(self, *, is_cuda: bool = True) -> list[FusedKernels]:
        """Return the callbacks that the Trainer is given beside the router; without a GPU fp8 is emulated."""
        base = ("fp8" if is_cuda else "fp8_reference") if self.wants_fp8 else "model_dtype"
        return [FusedKernels(cuda_graphs=self.wants_graphs, base_compute=base)] if self.wants_fused else []

    def make_trainer(self, callback: Callback, *, is_cuda: bool, **options: Any) -> Trainer:
        """Return a Trainer on one device that writes nothing, clips gradients at 1, and calls a callback of one's own
        first.
        """
        return Trainer(
            accelerator="gpu" if is_cuda else "cpu", devices=1, strategy=FastFTStrategy(activations=self.checkpointing),
            callbacks=[callback, *self.callbacks(is_cuda=is_cuda)], logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, gradient_clip_val=1.0, num_sanity_val_steps=0,
            **options,
        )  # fmt: skip


def parse_mode(mode: str) -> Mode:
    """Return what a mode asks for: NAME[=VRAM_GIB][:HOST_GIB], with any of +liger, +fused, +graphs[=auto], +fp8,
    +stream or +resident, +ragged and +tilesN.

    "fused" adds FusedKernels, "graphs" adds it with CUDA graphs, "graphs=auto" with those where the device waits for
    the host, "fp8" with products in fp8 (an approximation, with bounds of its own in the judge and separate rows),
    "stream" keeps frozen weights on the host, "resident" keeps those that FSDP2 shards gathered, "tilesN"
    runs feed-forward blocks in N tiles (without it "auto" adds tiles where nothing else fits), "ragged" trains packs of
    many lengths after the first. "shipped" is what the shipped configs ask for.

    Raises:
        ValueError: There is no such mode.

    Example:
        >>> parse_mode("auto=14.5:32+liger").checkpointing.options.vram_budget_bytes / 2**30
        14.5
    """
    rest, *added = (SHIPPED_MODE if mode == SHIPPED else mode).split("+")
    rest, _, host = rest.partition(":")
    name, _, vram = rest.partition("=")
    tiles = [int(part.removeprefix("tiles")) for part in added if part.removeprefix("tiles").isdecimal()]
    is_known = len(tiles) + sum(part in _ADDED for part in added) == len(added)
    if name not in POLICIES or not is_known or {"stream", "resident"} <= {*added}:
        raise ValueError(
            "A mode is NAME[=VRAM_GIB][:HOST_GIB][+liger][+fused][+graphs[=auto]][+fp8][+stream][+ragged][+tilesN], or "
            f"+resident in place of +stream, with {', '.join(POLICIES)}; got {mode!r}."
        )
    options = {**POLICIES[name], "mlp_tiles": max(tiles, default="auto")}
    for weights in {"stream", "resident"} & {*added}:
        options["weights"] = weights
    if options["policy"] in ("offload", "auto") or "stream" in added:
        options["host_budget"] = float(host or DEFAULT_HOST_GIB)
    if vram:
        options["vram_budget"] = float(vram)
    wants_fused = bool({"fused", "graphs", "graphs=auto", "fp8"} & {*added})
    wants_graphs = "auto" if "graphs=auto" in added else "graphs" in added
    return Mode(OffloadCheckpointing(**options), "liger" in added, wants_fused, wants_graphs, "fp8" in added)


def least_warmup(mode: str) -> int:
    """Return how many steps come before the first that may be timed."""
    mode = SHIPPED_MODE if mode == SHIPPED else mode
    least = LEAST_AUTO_WARMUP if mode.startswith("auto") else 1
    return max(least, _GRAPHS_WARMUP) if "+graphs" in mode else least


def describe_plan(checkpointing: OffloadCheckpointing) -> dict[str, Any]:
    """Return what is in effect in plain numbers: the prediction where there is one, the costs it was made from,
    what the engine holds.
    """
    if not checkpointing.stacks:
        return {"text": checkpointing.describe()}
    stack = checkpointing.stacks[-1]
    segments = stack.segments
    found: dict[str, Any] = {
        "text": stack.describe(),
        "num_layers": len(segments),
        "num_kept": sum(segment.plan.is_kept for segment in segments),
        "num_host_inputs": sum(segment.plan.input_place == "host" for segment in segments),
        "num_host_values": sum(place == "host" for segment in segments for place in segment.places.values()),
        "num_device_values": sum(place == "device" for segment in segments for place in segment.places.values()),
    }
    if stack.engine is not None:
        found["engine"] = describe_use(stack.engine)
    if stack.weights.streamed is not None:
        streamed = stack.weights.streamed
        found["streamed"] = {
            "num_host_bytes": streamed.num_host_bytes,
            "num_slot_bytes": streamed.num_slot_bytes,
            "statuses": streamed.statuses,
        }
    if stack.plan is not None:
        prediction = stack.plan.prediction
        found["predicted"] = {
            "peak_gib": prediction.peak_bytes / _GIB,
            "step_ms": prediction.step_ms,
            "exposed_ms": prediction.exposed_ms,
            "host_gib": prediction.host_bytes / _GIB,
            "staging_gib": prediction.staging_bytes / _GIB,
        }
        found["notes"] = list(stack.plan.notes)
    if stack.cost is not None:
        middle = stack.cost.segments[len(segments) // 2]
        found["cost"] = {
            "base_gib": stack.cost.base_bytes / _GIB,
            "head_peak_gib": stack.cost.head_peak_bytes / _GIB,
            "head_ms": stack.cost.head_ms,
            "other_ms": stack.cost.other_ms,
            "middle_segment": {**middle._asdict(), "values": [value._asdict() for value in middle.values]},
        }
    return found


def has_host_tensors(checkpointing: OffloadCheckpointing) -> bool:
    """Whether anything goes to the host now."""
    return any(
        (stack.engine is not None and stack.engine.slab.num_bytes) or stack.weights.streamed is not None
        for stack in checkpointing.stacks
    )


def check_plan(
    tuner: FineTuner, batch: PackedBatch, checkpointing: OffloadCheckpointing, *, is_cuda: bool
) -> dict[str, Any]:
    """Compare the gradients of one batch under the plan in effect with those of plain recompute, on the same weights,
    without an optimizer step.

    Both runs use deterministic kernels where the device has them, so that equal means equal bits.

    Args:
        tuner: Between two steps.
        batch: On the device.
        checkpointing: Of the strategy.
        is_cuda: Whether this is a GPU.

    Returns:
        Whether the bits are equal, and the judge's verdict.

    Raises:
        ValueError: The gradients differ by more than the judge allows.
    """
    (stack,) = checkpointing.stacks
    with unwatched(stack, is_cuda=is_cuda):
        try:
            with deterministic():
                planned, plain = _both(tuner, batch, stack)
            told = {"is_deterministic": True}
        except RuntimeError as error:
            # A kernel without a deterministic form, or no memory for it.
            told = {"is_deterministic": False, "why": str(error)[:300]}
            error.__traceback__ = None
        if not told["is_deterministic"]:
            # Cycles of the failed step hold its activations.
            gc.collect()
            try:
                planned, plain = _both(tuner, batch, stack)
            except RuntimeError as error:
                error.add_note(f"With deterministic kernels, before: {told['why']}")
                raise
        num_equal = sum(torch.equal(planned[name], plain[name]) for name in plain if name in planned)
        verdict = judging.judge(planned, plain, device="cuda" if is_cuda else "cpu")
    if not verdict.passed:
        raise ValueError(f"The gradients under the plan are not those of recompute: {verdict.reason}")
    return {
        **told,
        "num_equal": num_equal,
        "num_tensors": len(plain),
        "is_bitwise": num_equal == len(plain),
        "worst_cosine": verdict.worst_cosine,
    }


def check_graphs(
    tuner: FineTuner, batch: PackedBatch, *, is_cuda: bool, may_be_none: bool = False
) -> dict[str, Any] | None:
    """Compare the gradients of one batch by recorded layers with those of layers that run as ever, on the same weights,
    without an optimizer step.

    Args:
        tuner: Between two steps.
        batch: On the device.
        is_cuda: Whether this is a GPU.
        may_be_none: Whether it is for the host's pace to decide what is recorded.

    Returns:
        The judge's verdict; None where nothing is recorded and need not be.

    Raises:
        ValueError: The gradients differ by more than the judge allows, or nothing was recorded.
    """
    layers = [module for module in tuner.model.modules() if GRAPH_ATTRIBUTE in vars(module)]
    graphs = [vars(layer)[GRAPH_ATTRIBUTE] for layer in layers]
    if not any(graph.has_recordings for graph in graphs):
        if may_be_none:
            return None
        if is_cuda:
            raise ValueError("No layer was recorded.")
    recorded = _gradients(tuner, batch)
    for layer in layers:
        delattr(layer, GRAPH_ATTRIBUTE)
    try:
        plain = _gradients(tuner, batch)
    finally:
        for layer, graph in zip(layers, graphs):
            setattr(layer, GRAPH_ATTRIBUTE, graph)
    verdict = judging.judge(recorded, plain, device="cuda" if is_cuda else "cpu")
    if is_cuda:
        # What the comparison took is no part of the system's memory.
        torch.cuda.empty_cache()
    if not verdict.passed:
        raise ValueError(f"The gradients of recorded layers are not those of layers that run as ever: {verdict.reason}")
    return {"num_tensors": len(plain), "worst_cosine": verdict.worst_cosine}


def _both(
    tuner: FineTuner, batch: PackedBatch, stack: SegmentStack
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    planned = _gradients(tuner, batch)
    with recomputed(stack):
        return planned, _gradients(tuner, batch)


def _gradients(tuner: FineTuner, batch: PackedBatch) -> dict[str, torch.Tensor]:
    tuner.zero_grad(set_to_none=True)
    try:
        tuner.model(**batch).loss.backward()
        return judging.read_gradients(tuner.model)
    finally:
        tuner.zero_grad(set_to_none=True)


@contextmanager
def unwatched(stack: SegmentStack, *, is_cuda: bool) -> Iterator[None]:
    """Lift the cap of the process for a comparison, and hide its forwards from the watch over the budget.

    What a comparison takes is no part of the system's memory. A watch that saw it at the cap would plan again for less,
    in the middle of the comparison.
    """
    watch, stack.watch = stack.watch, None
    share = torch.cuda.get_per_process_memory_fraction() if is_cuda else 1.0
    if is_cuda:
        torch.cuda.set_per_process_memory_fraction(1.0)
    try:
        yield
    finally:
        stack.watch = watch
        if is_cuda:
            torch.cuda.empty_cache()
            torch.cuda.set_per_process_memory_fraction(share)


@contextmanager
def recomputed(stack: SegmentStack) -> Iterator[None]:
    """Recompute every segment, with inputs where the plan has them, so that a budget is kept; then restore the plan."""
    plans, engine = [segment.plan for segment in stack.segments], stack.engine
    for segment, plan in zip(stack.segments, plans):
        segment.follow(RECOMPUTE._replace(input_place=plan.input_place), engine)
    try:
        yield
    finally:
        for segment, plan in zip(stack.segments, plans):
            segment.follow(plan, engine)


@contextmanager
def deterministic() -> Iterator[None]:
    """Ask every kernel for the same bits in every run; a warning alone would leave the flash kernels as they are."""
    workspace, was_filling = os.environ.get(_WORKSPACE), torch.utils.deterministic.fill_uninitialized_memory
    # Read by torch at each product; cuBLAS itself has read it long ago, so its kernels stay.
    os.environ[_WORKSPACE] = ":4096:8"
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = was_filling
        if workspace is None:
            del os.environ[_WORKSPACE]
        else:
            os.environ[_WORKSPACE] = workspace
