"""Count the FLOPs of a training step from the shapes of a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn

if TYPE_CHECKING:
    import torch

# A multiply and an add per weight and token; attention multiplies queries with keys and weights with values.
FLOPS_PER_WEIGHT = 2
_ACTIVE_EXPERT_NAMES = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "top_k_experts")
# Names of transformers in ``config.layer_types``.
_TYPES_WITHOUT_SOFTMAX = frozenset({"linear_attention", "conv", "mlp", "moe"})


class LayerFlops(NamedTuple):
    """FLOP counts of one decoder layer: active weights per token, trained weights, and attention.

    Args:
        num_active_weights: Weights that multiply each token; for experts, the share used by one token.
        num_trained_weights: Active weights that get a gradient.
        attention_width: Heads x (width of a query head + width of a value head); 0 without softmax attention.
        window: Keys a query sees; None for all of its document.
        has_backward: Gradients pass through this layer.
    """

    num_active_weights: float
    num_trained_weights: float
    attention_width: int
    window: int | None
    has_backward: bool


class ModelFlops(NamedTuple):
    """FLOP counts of a model without recomputation, as used by "model FLOPs utilisation".

    Args:
        layers: One entry per decoder layer.
        num_head_weights: Weights of the output head, which runs only on labelled tokens.
        is_head_trained: Whether the head gets a gradient.
        has_backward: Whether gradients pass from the head into the decoder.
    """

    layers: list[LayerFlops]
    num_head_weights: int
    is_head_trained: bool
    has_backward: bool

    def step_flops(self, *, num_tokens: int, num_labelled: int, sum_squared_lengths: int) -> float:
        """Return the FLOPs of forward and backward over packed documents.

        The head runs only on labelled tokens, and causal attention computes half of the pairs that the squared lengths
        count.
        """
        num_head_products = 1 + self.has_backward + self.is_head_trained
        total = float(FLOPS_PER_WEIGHT * self.num_head_weights * num_labelled * num_head_products)
        for layer in self.layers:
            forward = FLOPS_PER_WEIGHT * layer.num_active_weights * num_tokens
            total += (
                forward * (2 if layer.has_backward else 1) + FLOPS_PER_WEIGHT * layer.num_trained_weights * num_tokens
            )
            num_pairs = sum_squared_lengths / 2
            if layer.window is not None:
                num_pairs = min(num_pairs, float(num_tokens * layer.window))
            # Backward: gradients of queries, keys, values and scores are two products for each of the forward's.
            total += FLOPS_PER_WEIGHT * layer.attention_width * num_pairs * (3 if layer.has_backward else 1)
        return total


def count_flops(model: nn.Module, layers: list[nn.Module]) -> ModelFlops:
    """Return the FLOP counts of a causal language model from the shapes of its weights.

    All weights with at least two axes in the decoder layers (linear layers, routers, experts, adapters) and the head
    are counted. Embeddings, norms, element-wise operations and the states of linear attention are not. A frozen weight
    costs its forward and the gradient of its input; a trained weight also costs its own gradient. Layers below the
    first trained weight have no backward.

    Cost:
        One walk over the modules on the host; no device work.

    Source:
        2 N forward and 4 N backward per token: Kaplan et al., arXiv 2001.08361; the split for frozen weights is own.
    """
    config: Any = model.config
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    causal_model: Any = model
    embedding = causal_model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    has_backward = embedding is not None and any(parameter.requires_grad for parameter in embedding.parameters())
    counted = []
    for index, layer in enumerate(layers):
        num_active, num_trained = _count_weights(layer, config)
        has_backward = has_backward or any(parameter.requires_grad for parameter in layer.parameters())
        counted.append(
            LayerFlops(num_active, num_trained, _attention_width(config, index), _window(config, index), has_backward)
        )
    head = causal_model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    head_weight = getattr(head, "weight", None)
    return ModelFlops(
        layers=counted,
        num_head_weights=0 if head_weight is None else _num_weights(head, "weight", head_weight),
        is_head_trained=bool(head_weight is not None and head_weight.requires_grad),
        has_backward=has_backward,
    )


def _count_weights(layer: nn.Module, config: Any) -> tuple[float, float]:
    """Return the active weights per token of a layer, and the trained ones among them."""
    num_active = num_trained = 0.0
    seen: set[int] = set()
    for path, module in layer.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.ndim < 2 or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            num_weights = _num_weights(module, name, parameter) * _active_share(path, parameter, config)
            num_active += num_weights
            num_trained += num_weights * parameter.requires_grad
    return num_active, num_trained


def _num_weights(module: nn.Module | None, name: str, parameter: torch.Tensor) -> int:
    """Return the number of weights of a parameter; quantised storage has fewer elements than weights."""
    in_features, out_features = getattr(module, "in_features", None), getattr(module, "out_features", None)
    if name == "weight" and isinstance(in_features, int) and isinstance(out_features, int):
        return in_features * out_features
    return parameter.numel()


def _active_share(path: str, parameter: torch.Tensor, config: Any) -> float:
    """Return the share of a parameter used by one token: 1, or for routed experts the share of active experts."""
    parts = path.split(".")
    if "experts" not in parts:
        return 1.0
    num_active = next((getattr(config, name) for name in _ACTIVE_EXPERT_NAMES if getattr(config, name, None)), None)
    num_experts = parameter.shape[0] if parameter.ndim == 3 else _num_experts(config)
    return 1.0 if not num_active or not num_experts else min(1.0, num_active / num_experts)


def _num_experts(config: Any) -> int | None:
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    return next((getattr(config, name) for name in names if getattr(config, name, None)), None)


def _layer_type(config: Any, index: int) -> str | None:
    """Return the type of a layer; None for a model whose layers are all alike."""
    layer_types = getattr(config, "layer_types", None)
    return None if layer_types is None or index >= len(layer_types) else layer_types[index]


def _attention_width(config: Any, index: int) -> int:
    """Return the width of the softmax attention of a layer; 0 for linear attention, convolutions and plain MLPs."""
    if _layer_type(config, index) in _TYPES_WITHOUT_SOFTMAX:
        return 0
    num_heads = config.num_attention_heads
    head_width = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    query_width = getattr(config, "qk_head_dim", None) or head_width
    value_width = getattr(config, "v_head_dim", None) or head_width
    return num_heads * (query_width + value_width)


def _window(config: Any, index: int) -> int | None:
    """Return the sliding window of a layer; None for full attention."""
    window = getattr(config, "sliding_window", None)
    if not window or getattr(config, "use_sliding_window", True) is False:
        return None
    if getattr(config, "layer_types", None) is None:
        return window
    return window if _layer_type(config, index) == "sliding_attention" else None
