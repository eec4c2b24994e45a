"""Sizes of a model, as the GPUs of a cluster hold and exchange it."""

from __future__ import annotations

from typing import NamedTuple

from torch import nn
from transformers import PreTrainedModel

from lightning_fastft.fused.layer_parts import fp8_shapes
from lightning_fastft.hf.expert_nf4 import is_stack
from lightning_fastft.hf.families import decoder_layers
from lightning_fastft.hf.sharding.units import AdapterPlacement, places_whole
from lightning_fastft.planner.step import SegmentCost, StepCost

# Scales of an output column in fp32 and in bf16.
SCALE_BYTES = 6


class LayerSize(NamedTuple):
    """Sizes of a decoder layer, or of the tensors outside of the layers.

    Args:
        frozen_bytes: Frozen weights as they are held (NF4: packed).
        num_trained: Trained numbers.
        expert_bytes: Part of frozen_bytes that belongs to routed experts.
        num_expert_trained: Part of num_trained that belongs to routed experts.
        num_fp8: Frozen weights that compute in fp8, which sharding layouts gather in e4m3.
        num_fp8_columns: Output columns of these weights, each with two scales.
        max_fp8: The largest number of these weights that one product reads.
    """

    frozen_bytes: float
    num_trained: int
    expert_bytes: float
    num_expert_trained: int
    num_fp8: int = 0
    num_fp8_columns: int = 0
    max_fp8: int = 0

    @property
    def fp8_copy_bytes(self) -> int:
        """Memory of the e4m3 weights and their transposes on one device, with their scales."""
        return 2 * self.num_fp8 + self.num_fp8_columns * SCALE_BYTES


class ModelSize(NamedTuple):
    """Sizes of a model, as a cluster exchanges and holds them.

    Args:
        layers: Decoder layers.
        root: Everything else: embedding, head, last norm.
        trained_itemsize: Bytes of a trained number when it is gathered: 4 for adapters, else those of the dtype.
        state_itemsize: Bytes of a trained number with gradient and optimizer state.
        itemsize: Bytes of an activation.
        width: Hidden width.
        num_heads: Query heads.
        attention_columns: Columns of queries, keys and values of a token.
        output_columns: Columns of the attention output of a token.
        num_experts: Routed experts of a layer; 0 in a dense model.
        shared_bytes: Memory of each GPU that is neither weights nor their state.
        replicates_adapters: Whether every GPU of a sharding layout holds the trained numbers whole, as
            ``FastFTFSDPStrategy(adapters=...)`` places them.
    """

    layers: tuple[LayerSize, ...]
    root: LayerSize
    trained_itemsize: int
    state_itemsize: float
    itemsize: int
    width: int
    num_heads: int
    attention_columns: int
    output_columns: int
    num_experts: int
    shared_bytes: int
    replicates_adapters: bool

    @property
    def parts(self) -> tuple[LayerSize, ...]:
        """Layers and root."""
        return (*self.layers, self.root)

    def gathered_bytes(self, part: LayerSize, *, is_resident: bool = False) -> float:
        """Return the bytes of the weights of a part that are gathered for each use."""
        return (0 if is_resident else self.sharded_bytes(part)) + part.num_trained * self.trained_itemsize

    def sharded_bytes(self, part: LayerSize) -> float:
        """Return the bytes of the frozen weights of a part as they are sharded and gathered: in e4m3 if they compute in
        fp8.
        """
        return part.frozen_bytes - part.num_fp8 * (self.itemsize - 1)

    @property
    def gathers_fp8(self) -> bool:
        """Whether sharding layouts gather frozen weights in e4m3."""
        return any(layer.num_fp8 for layer in self.layers)


def measure_model(
    model: PreTrainedModel, cost: StepCost, *, is_fp8: bool = False, adapters: AdapterPlacement = "auto"
) -> ModelSize:
    """Return the sizes of a model on the meta device whose adapters were added.

    Args:
        model: The model that was passed to ``model_costs``.
        cost: What ``model_costs`` returned for it.
        is_fp8: The ``Swaps.is_fp8`` of this cost.
        adapters: As in ``FastFTFSDPStrategy``.
    """
    config = model.config.get_text_config(decoder=True)
    layers = [
        _layer_size(layer, segment, is_fp8=is_fp8) for layer, segment in zip(decoder_layers(model), cost.segments)
    ]
    inside = {id(parameter) for layer in decoder_layers(model) for parameter in layer.parameters()}
    outside = [parameter for parameter in model.parameters() if id(parameter) not in inside]
    root_frozen = sum(p.nbytes for p in outside if not p.requires_grad)
    root = LayerSize(root_frozen, sum(p.numel() for p in outside if p.requires_grad), 0.0, 0)
    num_trained = sum(part.num_trained for part in (*layers, root))
    frozen_bytes = sum(part.frozen_bytes + part.fp8_copy_bytes for part in (*layers, root))
    has_adapters = any(not parameter.requires_grad for parameter in model.parameters())
    num_heads, head_width = _heads(config)
    num_kv_heads = getattr(config, "num_key_value_heads", None) or num_heads
    return ModelSize(
        layers=tuple(layers),
        root=root,
        trained_itemsize=4 if has_adapters else model.dtype.itemsize,
        state_itemsize=(cost.base_bytes - cost.shared_bytes - frozen_bytes) / max(1, num_trained),
        itemsize=model.dtype.itemsize,
        width=config.hidden_size,
        num_heads=num_heads,
        attention_columns=(num_heads + 2 * num_kv_heads) * head_width,
        output_columns=num_heads * head_width,
        num_experts=max((stack.shape[0] for layer in decoder_layers(model) for stack in _stacks(layer)), default=0),
        shared_bytes=cost.shared_bytes,
        replicates_adapters=places_whole(model, adapters),
    )


def _layer_size(layer: nn.Module, segment: SegmentCost, *, is_fp8: bool) -> LayerSize:
    products = fp8_shapes(layer) if is_fp8 else []
    sizes = [sum(shape.numel() for shape in shapes) for shapes in products]
    trained = [parameter for parameter in layer.parameters() if parameter.requires_grad]
    experts = _stacks(layer)
    frozen_experts = [parameter for parameter in experts if not parameter.requires_grad]
    return LayerSize(
        frozen_bytes=segment.weight_bytes,
        num_trained=sum(parameter.numel() for parameter in trained),
        # NF4 numel() is the logical size; use held_bytes for memory.
        expert_bytes=sum(getattr(stack, "held_bytes", stack.nbytes) for stack in frozen_experts),
        num_expert_trained=sum(parameter.numel() for parameter in experts if parameter.requires_grad),
        num_fp8=sum(sizes),
        num_fp8_columns=sum(shape[0] for shapes in products for shape in shapes),
        max_fp8=max(sizes, default=0),
    )


def _stacks(layer: nn.Module) -> list[nn.Parameter]:
    """Return the stacks of routed experts' weights of a layer."""
    return [
        parameter
        for module in layer.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if is_stack(module, name)
    ]


def _heads(config: object) -> tuple[int, int]:
    heads = getattr(config, "num_attention_heads", 1)
    num_heads = max(heads) if isinstance(heads, (list, tuple)) else int(heads)
    width = getattr(config, "head_dim", None) or config.hidden_size // num_heads  # type: ignore[attr-defined]
    return num_heads, int(width)
