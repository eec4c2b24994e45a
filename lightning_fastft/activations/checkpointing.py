"""OffloadCheckpointing: the one switch for activation checkpointing."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, get_args

import torch
from torch import nn

from lightning_fastft.activations.budgets import cap_memory, device_bytes, expand_segments, peak_memory_bytes
from lightning_fastft.activations.frozen_weights import FrozenWeights, GatheredWeights
from lightning_fastft.activations.planning import NOTCH, StackOptions
from lightning_fastft.activations.segments import Segment
from lightning_fastft.activations.stack import SegmentStack
from lightning_fastft.activations.vram_budget import HeadSizes
from lightning_fastft.core.checks import check_choice, check_float, check_int
from lightning_fastft.core.errors import OptionError, SwapError
from lightning_fastft.core.patcher import ModelPatcher
from lightning_fastft.core.run_environment import RunEnvironment
from lightning_fastft.core.status import Status

Policy = Literal["auto", "keep", "offload", "recompute"]
STATUS_NAME = "activations"
MEMORY_STATUS = "device memory"
# One pebibyte; a larger value was probably given in bytes.
_MOST_GIB = float(2**20)

_UNKNOWN_HEAD = HeadSizes()

logger = logging.getLogger(__name__)


class OffloadCheckpointing:
    """Keep, offload or recompute the activations of each decoder layer.

    Each model gets one slab of pinned host memory, fixed staging slots and two copy streams; the copies of a layer
    start before its backward. Decoder layers of transformers are reached through their own checkpointing attributes
    (``gradient_checkpointing`` and ``_gradient_checkpointing_func``), other modules through the ``forward`` of the
    instance, so no class and no source changes. With deterministic kernels, gradients are bit-equal for every policy.
    No-op in evaluation mode and without gradients. transformers 5.23 does not checkpoint a decoder layer that is
    compiled as a whole; compile its parts instead (``layer.mlp.compile()``).

    Args:
        policy: "keep" stores every activation. "recompute" stores the input of each layer and runs the layer again in
            the backward. "offload" does the same with the inputs in pinned host memory. "auto" recomputes in the first
            three steps and measures them. Then it keeps on the device the activations that cost most to recompute,
            offloads those whose copies overlap with compute, and recomputes the rest. On a CPU "auto" keeps everything.
        vram_budget: Device memory, in GiB, that the process may reserve under "auto", loading and the first steps
            included; our strategies cap the allocator at it. The CUDA context and NCCL's buffers are not part of it.
            "auto" is the memory of the process plus 90 % of the free memory, without a cap.
        host_budget: Pinned host memory of each rank, in GiB; "auto" is half of the host's available memory, shared by
            its ranks.
        buffers: Number of staging slots: 2 fetches one layer ahead, more fetch further ahead, 1 copies serially (for
            comparison).
        weights: "stream" keeps the frozen weights of the decoder layers, the input embedding and the output layer in
            pinned host memory, and copies each layer to the device before its use. Our strategies then build the model
            on the host, and the device holds one tensor of it at a time; adapters that are computed from the base
            (DoRA, PiSSA, EVA) need the whole base on the device once. "auto" streams under policy "auto"
            if no plan fits otherwise, or if the planner predicts a step at least 3 % faster. "resident" never does.
            While weights are streamed, reads of their values raise: code of your own calls ``model.lm_head(hidden)``
            and does not read ``model.lm_head.weight``; ``model.state_dict()`` has the values. Copies of the model
            (``copy.deepcopy``, Lightning's ``WeightAveraging``) and merges of adapters raise too. Sharded weights
            (FSDP2) stay gathered under "resident", and under "auto" as far as policy "auto" leaves memory of its
            budget: frozen layers for the whole run, layers with trained weights from a forward to its backward.
            Otherwise each use gathers them.
        mlp_tiles: Number of tiles of tokens in which dense feed-forward blocks run, so that the intermediates of only
            one tile exist at a time, for long packs. 1 disables tiles. "auto" uses 8 under policy "auto" if the first
            steps do not fit otherwise, or are predicted not to within ``vram_budget``, else 1. GEMMs of fewer rows
            round differently, so gradients are not bit-equal.

    Raises:
        OptionError: A value is not allowed.

    Example:
        >>> OffloadCheckpointing("recompute").describe()
        'recompute: the input of each decoder layer is held, the layer runs again in the backward'
    """

    def __init__(
        self,
        policy: Policy = "auto",
        *,
        vram_budget: float | Literal["auto"] = "auto",
        host_budget: float | Literal["auto"] = "auto",
        buffers: int = 2,
        weights: Literal["auto", "resident", "stream"] = "auto",
        mlp_tiles: int | Literal["auto"] = "auto",
    ) -> None:
        self.policy = check_choice("policy", policy, get_args(Policy))
        if policy != "auto" and (not isinstance(vram_budget, str) or vram_budget != "auto"):
            raise OptionError(
                f"vram_budget={vram_budget!r} applies to policy 'auto' only; policy {policy!r} does not use it."
            )
        check_choice("weights", weights, ("auto", "resident", "stream"))
        if policy == "keep" and weights == "stream":
            raise OptionError(
                "weights='stream' frees device memory, and policy 'keep' fills it with activations: use policy 'auto' "
                "with vram_budget."
            )
        # Tiles from the start; "auto" may add tiles to a stack later.
        self.mlp_tiles = 1 if mlp_tiles == "auto" else check_int("mlp_tiles", mlp_tiles, low=1, high=1024)
        vram_budget_bytes = _read_gib("vram_budget", vram_budget)
        if vram_budget_bytes == 0:
            raise OptionError(
                f"vram_budget must be more than 0 GiB, got {vram_budget}: no step runs without memory. Use 'auto', or "
                "policy 'recompute' for the least memory."
            )
        self.options = StackOptions(
            policy=policy,
            vram_budget_bytes=vram_budget_bytes,
            host_budget_bytes=_read_gib("host_budget", host_budget),
            buffers=check_int("buffers", buffers, low=1, high=8),
            weights=weights,
            mlp_tiles=self.mlp_tiles,
            may_tile=mlp_tiles == "auto" and policy == "auto",
        )
        if policy == "keep" and self.mlp_tiles > 1:
            raise OptionError(
                f"mlp_tiles={mlp_tiles} recomputes blocks in the backward, which policy 'keep' forbids: use 'auto' or "
                "'recompute'."
            )
        self.stacks: list[SegmentStack] = []
        # Whether the allocator was given expandable segments, and the device that is capped at the budget.
        self._has_segments = False
        self._capped_device: torch.device | None = None
        # By the name of a status.
        self._last_descriptions: dict[str, str] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Keep only the options in a copy or pickle; streams and pinned memory stay with the original."""
        return vars(self) | {"stacks": [], "_has_segments": False, "_capped_device": None, "_last_descriptions": {}}

    def __repr__(self) -> str:
        return f"OffloadCheckpointing({self.policy!r})"

    def describe(self) -> str:
        """Return the treatment of activations in one line."""
        return {
            "keep": "keep: every activation is held, nothing is recomputed",
            "recompute": "recompute: the input of each decoder layer is held, the layer runs again in the backward",
            "offload": "offload: the input of each decoder layer goes to pinned memory, the layer runs again in the "
            "backward",
            "auto": "auto: planned from the first steps; held, on the host or recomputed, layer by layer",
        }[self.policy]

    def attach(
        self,
        layers: Sequence[nn.Module],
        patcher: ModelPatcher,
        *,
        containers: Iterable[nn.Module] = (),
        environment: RunEnvironment | None = None,
        weights: FrozenWeights | None = None,
        gathered: GatheredWeights | None = None,
        head: HeadSizes = _UNKNOWN_HEAD,
        name: str = STATUS_NAME,
    ) -> Status:
        """Apply the policy to decoder layers until the patcher undoes it.

        Args:
            layers: Decoder layers, in the order in which they run.
            patcher: Records every change.
            containers: Modules around the layers with the checkpointing flag of transformers, which disables their
                key/value cache.
            environment: Environment of the run; None for a single process without a strategy.
            weights: The frozen weights of the layers; None if they cannot move to the host.
            gathered: Lets sharded weights stay gathered; None if none are sharded.
            head: Sizes outside of the layers, to predict the memory of the first steps.
            name: Name of the status; each of several models has its own.

        Returns:
            The status.

        Raises:
            SwapError: There is no layer.
            OptionError: The policy is "keep" and the model already recomputes; this plugin must be the only switch.

        Cost:
            "recompute": one more forward of the layers per backward, without the operations that only their output
            needs. "offload": the same, and copies on their own streams. "auto": as planned. No host sync in a step,
            except once when "auto" reads its measurements.
        """
        if not layers:
            raise SwapError("There is no decoder layer to attach activation checkpointing to.")
        containers = list(containers)
        checkpointed = [module for module in [*layers, *containers] if getattr(module, "gradient_checkpointing", False)]
        describe_gathered: Callable[[], str] = str
        trained_bytes = 0
        if gathered is not None and self.options.weights == "resident":
            describe_gathered, trained_bytes = gathered.keep_all()
        if self.policy == "keep":
            if checkpointed:
                raise OptionError(
                    f"{type(checkpointed[0]).__name__} already recomputes its activations "
                    "(gradient_checkpointing_enable() was called on the model), but the policy is 'keep'. Remove that "
                    'call. To recompute, pass activations=OffloadCheckpointing("recompute").'
                )
            found = "; ".join(filter(None, [self.describe(), describe_gathered()]))
            self._last_descriptions[STATUS_NAME] = self._last_descriptions[name] = found
            return Status(name, "active", found)
        stack = SegmentStack(
            layers,
            self.options,
            environment=RunEnvironment() if environment is None else environment,
            patcher=patcher,
            weights=weights,
            gathered=gathered if self.options.weights == "auto" else None,
            head=head,
            name=name,
        )
        stack.describe_gathered, stack.trained_bytes = describe_gathered, trained_bytes
        self.stacks.append(stack)
        patcher.add_undo(functools.partial(self._detach, stack))
        for layer, segment in zip(layers, stack.segments):
            _take_over(layer, segment.run, patcher)
        for module in containers:
            patcher.set_attribute(module, "gradient_checkpointing", True)
        taken_over = ", taken over from the model's own checkpointing" if checkpointed else ""
        parts = [self.describe(), f"{len(layers)} layers{taken_over}", describe_gathered()]
        return Status(name, "active", "; ".join(filter(None, parts)))

    def last_segments(self) -> list[Segment]:
        """Return the segments of the stack attached last; none under policy "keep"."""
        return self.stacks[-1].segments if self.stacks else []

    def status(self, name: str = STATUS_NAME) -> Status:
        """Return the current status of the model that was attached by this name, with the plan; by default of all."""
        stacks = [stack for stack in self.stacks if name in (STATUS_NAME, stack.name)]
        if stacks:
            self._last_descriptions[name] = f"{self.policy}: " + " | ".join(stack.describe() for stack in stacks)
        return Status(name, "active", self._last_descriptions.get(name, self.describe()))

    def memory_statuses(self) -> list[Status]:
        """Return the current statuses of device memory if it is capped, and of frozen weights and the embedding if they
        are streamed.
        """
        return [
            *([] if self._capped_device is None else [self._describe_cap(self._capped_device)]),
            *(status for stack in self.stacks for status in stack.weights.statuses),
        ]

    @property
    def streams_from_host(self) -> bool:
        """Whether frozen weights are streamed from the start, so that a model is best built on the host."""
        return self.options.weights == "stream"

    def stream(self, patcher: ModelPatcher) -> None:
        """Stream frozen weights until the patcher is undone. Call it before the model is built."""
        patcher.set_attribute(self, "options", self.options._replace(weights="stream"))

    def cap(self, device: torch.device, patcher: ModelPatcher) -> None:
        """Keep the memory that this process reserves on a device within ``vram_budget``, until the patcher undoes it.

        Call it before the model is built, and again once it is placed: with weights="stream", and a model on the device
        that is larger than the budget, the cap begins when its weights are on the host. There is no cap without a
        budget, and if the device has no more memory than that. The allocator gets expandable segments in any case,
        under every policy. No-op without CUDA.

        Raises:
            OptionError: The process has reserved more already.
        """
        if device.type != "cuda":
            return
        if not self._has_segments:
            patcher.set_attribute(self, "_has_segments", True)
            if (restore := expand_segments()) is not None:
                patcher.add_undo(restore)
        budget = self.options.vram_budget_bytes
        if budget is None or budget >= device_bytes(device) or self._capped_device is not None:
            return
        is_moving = self.streams_from_host and not self.stacks and torch.cuda.memory_reserved(device) > budget
        if not is_moving:
            patcher.add_undo(cap_memory(device, budget))
            patcher.set_attribute(self, "_capped_device", device)

    def place(self, device: torch.device) -> None:
        """Move frozen weights to the host if requested; called once the model is on its device, else in the first
        forward.
        """
        for stack in self.stacks:
            stack.place(device)

    @property
    def can_step_down(self) -> bool:
        """Whether ``step_down`` may reduce the memory use; only policy "auto" has other plans."""
        if self.policy != "auto":
            return False
        return self.advice() is not None or any(stack.measurement.is_keeping or stack.can_tile for stack in self.stacks)

    def step_down(self) -> bool:
        """Reduce the memory use after the device ran out of memory; return whether any stack could."""
        return any(stack.step_down() for stack in self.stacks)

    def advice(self) -> str | None:
        """Return the options for a restart after the device ran out of memory; None if a plan has none left."""
        peaks = [stack.plan.prediction.peak_bytes for stack in self.stacks if stack.plan is not None]
        if peaks:
            # A full device has less memory than planned, so plan for less; a cap can be raised.
            budget = self.options.vram_budget_bytes if self._capped_device is not None else None
            next_bytes = NOTCH * max(peaks) if budget is None else budget / NOTCH
            return f"OffloadCheckpointing('auto', vram_budget={next_bytes / 2**30:.1f})"
        if any(stack.can_stream for stack in self.stacks):
            return "OffloadCheckpointing('auto', weights='stream')"
        if any(stack.weights.streamed is not None and stack.num_tiles == 1 for stack in self.stacks):
            return "OffloadCheckpointing('auto', weights='stream', mlp_tiles=8), whose gradients differ by rounding"
        return None

    def remedy(self) -> str:
        """Return advice after the device ran out of memory, under any policy, as a clause for a message."""
        advice = self.advice()
        if advice is not None:
            return f"start again with {advice}"
        leaner = {"keep": "OffloadCheckpointing('auto')", "recompute": "OffloadCheckpointing('offload')"}.get(
            self.policy
        )
        shorter = "shorter packs, PackedDataModule(max_tokens=...), or batches of fewer rows"
        if leaner is None and self.mlp_tiles == 1 and not any(stack.num_tiles > 1 for stack in self.stacks):
            leaner = f"OffloadCheckpointing({self.policy!r}, mlp_tiles=8)"
        return f"start again with {shorter if leaner is None else f'{leaner}, or with {shorter}'}"

    def describe_budget(self) -> str:
        """Return the given budgets; with a vram_budget, also the memory of the leanest plan."""
        vram, host = self.options.vram_budget_bytes, self.options.host_budget_bytes
        shown = {
            name: "auto" if value is None else f"{value / 2**30:.1f} GiB"
            for name, value in (("vram_budget", vram), ("host_budget", host))
        }
        text = ", ".join(f"{name} {value}" for name, value in shown.items())
        least = [] if vram is None else [found for stack in self.stacks if (found := stack.least_bytes) is not None]
        return f"{text} (the leanest plan takes about {max(least) / 2**30:.1f} GiB)" if least else text

    def check_training_mode(self, layers: Sequence[nn.Module]) -> None:
        """Refuse trained layers in evaluation mode, because transformers does not recompute them.

        Layers without a trained parameter, such as those of a frozen teacher, may be in evaluation mode.

        Raises:
            OptionError: The policy is not "keep" and a trained layer is in evaluation mode.
        """
        idle = [
            layer
            for layer in layers
            if not layer.training and any(parameter.requires_grad for parameter in layer.parameters())
        ]
        if self.policy != "keep" and idle:
            raise OptionError(
                f"{len(idle)} of {len(layers)} decoder layers ({type(idle[0]).__name__}) are in evaluation mode, where "
                "transformers recomputes nothing. transformers loads models in that mode and Lightning keeps it. Call "
                ".train() on the model once after loading it, or .requires_grad_(False) if it is not trained."
            )

    def _describe_cap(self, device: torch.device) -> Status:
        budget, reserved = self.options.vram_budget_bytes, torch.cuda.max_memory_reserved(device)
        assert budget is not None
        peaks = f"peak {reserved / 2**30:.2f} GiB reserved, {peak_memory_bytes(device) / 2**30:.2f} allocated"
        return Status(MEMORY_STATUS, "active", f"capped at vram_budget, {budget / 2**30:.2f} GiB reserved; {peaks}")

    def _detach(self, stack: SegmentStack) -> None:
        self.status()
        self.status(stack.name)
        stack.executor.close_engine()
        self.stacks.remove(stack)


def _take_over(layer: nn.Module, run: Callable[..., Any], patcher: ModelPatcher) -> None:
    """Route the calls of a layer through its segment."""
    if hasattr(layer, "gradient_checkpointing"):
        patcher.set_attribute(layer, "_gradient_checkpointing_func", run)
        patcher.set_attribute(layer, "gradient_checkpointing", True)
        return
    patcher.set_attribute(layer, "forward", functools.partial(_run_in_training, layer, layer.forward, run))


def _run_in_training(
    layer: nn.Module,
    own_forward: Callable[..., Any],
    run: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Run a layer through its segment in training."""
    return run(functools.partial(own_forward, **kwargs), *args) if layer.training else own_forward(*args, **kwargs)


def _read_gib(name: str, value: float | str) -> int | None:
    """Return a budget in bytes, or None for "auto"."""
    if isinstance(value, str):
        if value == "auto":
            return None
        raise OptionError(f"{name} must be 'auto' or a number of GiB, got {value!r}.")
    return int(check_float(name, value, low=0.0, high=_MOST_GIB) * 2**30)
