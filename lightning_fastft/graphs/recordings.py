"""Recordings of decoder layers: the memory of the recorded work, and the state under which it is valid."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from lightning_fastft.activations.switches import is_random
from lightning_fastft.activations.values import find_segment
from lightning_fastft.graphs.buckets import PackBucket, StaticInput, load_rows
from lightning_fastft.hf.lora import switched_layers
from lightning_fastft.patches.deferred_mask import DeferredMask

if TYPE_CHECKING:
    from torch import nn

    from lightning_fastft.graphs.layer_graphs import LayerGraphs
    from lightning_fastft.graphs.runs import Run
    from lightning_fastft.planner.step import SegmentPlan

# Keywords of the loss, which layers do not read.
_FOREIGN_KEYWORDS = frozenset({"num_items_in_batch"})
_OUTPUT_FLAGS = ("output_attentions", "output_hidden_states", "output_router_logits")
_RECORDING = "transformers.utils.output_capturing"


class Recording:
    """Recording of one layer for one pack bucket of num_tokens tokens."""

    def __init__(
        self, graphs: LayerGraphs, layer: nn.Module, index: int, hidden: torch.Tensor, *, num_tokens: int
    ) -> None:
        self.layer = layer
        self.held: list[torch.Tensor] = []
        self._places = [(owner._parameters, name) for owner in layer.modules() for name in owner._parameters]
        self.parameters = list(layer.parameters())
        self._found = [held[name] for held, name in self._places]
        self.trained: list[torch.Tensor] = [parameter for parameter in self.parameters if parameter.requires_grad]
        self.adapters = switched_layers(layer)
        self.out = graphs.buffer(("out", index), hidden, num_tokens=num_tokens)
        self.d_hidden = graphs.buffer("gradient", hidden, num_tokens=num_tokens)
        before = graphs.buffer(("out", index - 1), hidden, num_tokens=num_tokens) if index else None
        # The recording reads the output of the previous layer in place.
        memory = (
            before
            if before is not None and before.data_ptr() == hidden.data_ptr()
            else graphs.buffer(("in", index), hidden, num_tokens=num_tokens)
        )
        if memory is not before:
            load_rows(memory, hidden.detach())
        self.hidden = memory.detach().requires_grad_(hidden.requires_grad)
        self.inputs: list[tuple[str, tuple[StaticInput, ...]]] = []
        self.constants: dict[str, Any] = {}
        self.plan: SegmentPlan | None = plan_of(layer)
        self.state = self._read_state()
        self.backends: Counter[str] = Counter()
        self.graph_out: torch.Tensor | None = None
        self.open_run: weakref.ref[Run] | None = None
        self.forward: Callable[[], None] | None = None
        self.backward: Callable[[], None] | None = None
        # Runs the forward eagerly in the memory of the recording, until the backward is recorded.
        self.run_forward: Callable[[], None] | None = None
        # Trained parameters and the memory of their gradients; recording the backward drops those without a gradient.
        self.gradients = [(parameter, graphs.gradient_of(parameter)) for parameter in self.trained]

    @property
    def is_in_use(self) -> bool:
        """Return whether a forward waits for its backward."""
        run = None if self.open_run is None else self.open_run()
        return run is not None and not run.is_over

    def own_inputs(self, bucket: PackBucket, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the keywords of a call with static copies in place of its tensors."""
        options: dict[str, Any] = {}
        num_tokens = kwargs["context"].num_tokens
        for name, value in kwargs.items():
            if name == "context":
                options[name] = bucket.context
            elif torch.is_tensor(value) or (isinstance(value, tuple) and value and all(map(torch.is_tensor, value))):
                given = value if isinstance(value, tuple) else (value,)
                pieces = tuple(bucket.input_for(piece, num_tokens=num_tokens) for piece in given)
                self.inputs.append((name, pieces))
                memory = tuple(piece.memory for piece in pieces)
                options[name] = memory if isinstance(value, tuple) else memory[0]
            else:
                options[name] = value
                if name not in _FOREIGN_KEYWORDS:
                    self.constants[name] = value
        return options

    def load(self, kwargs: dict[str, Any]) -> str:
        """Copy the inputs of a call; return the name of one that the recording cannot take, or ""."""
        for name, value in self.constants.items():
            given = kwargs.get(name)
            if given is not value and given != value and not isinstance(value, DeferredMask):
                return name
        for name, pieces in self.inputs:
            given = kwargs[name] if isinstance(kwargs[name], tuple) else (kwargs[name],)
            if not all(piece.fits(tensor) for piece, tensor in zip(pieces, given)):
                return name
            for piece, tensor in zip(pieces, given):
                piece.load(tensor)
        return ""

    def record_forward(
        self, graphs: LayerGraphs, run: Callable[..., Any], bucket: PackBucket, rest: tuple[Any, ...]
    ) -> list[str]:
        """Record the forward; return the attention backends that cannot be recorded, which make it unusable."""
        context = bucket.context
        before = context.reads.copy()

        def forward() -> None:
            with torch.enable_grad():
                self.graph_out = run(self.hidden, *rest)
            with torch.no_grad():
                self.out.data.copy_(self.graph_out)

        self.run_forward = forward
        self.forward = graphs.record(forward, recording=self, what="The forward of a layer")
        self.backends = context.reads - before
        return sorted(self.backends.keys() - graphs.backends)

    def is_current(self, layer: nn.Module, hidden: torch.Tensor) -> bool:
        """Return whether weights, their addresses, adapters, the plan, and whether the hidden states have a gradient,
        are unchanged since the recording.
        """
        are_same = all(held.get(name) is parameter for (held, name), parameter in zip(self._places, self._found))
        are_same = are_same and self.hidden.requires_grad == hidden.requires_grad
        return are_same and self.plan is plan_of(layer) and self.state == self._read_state()

    def _read_state(self) -> list[Any]:
        state: list[Any] = [(parameter.data_ptr(), parameter.requires_grad) for parameter in self.parameters]
        for adapter in self.adapters:
            scaling = getattr(adapter, "scaling", {})
            state.append(
                (
                    adapter.disable_adapters,
                    tuple(adapter.active_adapters),
                    tuple(adapter.merged_adapters),
                    tuple(scaling.values()),
                )
            )
        return state


def plan_of(layer: Any) -> SegmentPlan | None:
    """Return the activation plan of a layer, or None."""
    segment = find_segment(layer)
    return None if segment is None else segment.plan


def recording_obstacle(layer: Any, kwargs: dict[str, Any], *, config: Any) -> str:
    """Return why a layer cannot be recorded, given the keywords of a call and the configuration of its model, or ""."""
    asked = [flag for flag in _OUTPUT_FLAGS if kwargs.get(flag) or getattr(config, flag, False)]
    if asked:
        return f"{asked[0]} is requested"
    if any(is_random(module) for module in layer.modules()):
        return "dropout is active"
    hooked = next((type(module).__name__ for module in layer.modules() if _has_hooks(module)), "")
    if hooked:
        return f"{hooked} has hooks"
    for module in layer.modules():
        # FullyShardedDataParallel (version 1) sets views of a flat parameter on the modules in each forward.
        if any(torch.is_tensor(value) and value.requires_grad for value in vars(module).values()):
            return "weights are sharded"
    for parameter in layer.parameters():
        if parameter.requires_grad and (
            parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None)
        ):
            return "a parameter has hooks"
        if hasattr(parameter, "device_mesh"):
            return "weights are sharded"
    return ""


def _has_hooks(module: nn.Module) -> bool:
    """Return whether a module has hooks other than output capturing of transformers, which is a no-op by default."""
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    is_watched = any(getattr(hook, "__module__", "") != _RECORDING for hook in hooks)
    return bool(is_watched or module._backward_hooks or module._backward_pre_hooks)
