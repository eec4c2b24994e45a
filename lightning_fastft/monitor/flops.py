"""Count the floating-point operations that a model needs for a training step, from its shapes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn

if TYPE_CHECKING:
    import torch

# A multiply and an add per weight and token; attention multiplies queries with keys and weights with values.
FLOPS_PER_WEIGHT = 2
_ACTIVE_EXPERT_NAMES = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "top_k_experts")


class LayerFlops(NamedTuple):
    """What one decoder layer costs: weights met by a token, those of them that are trained, and its attention.

    Args:
        num_active_weights: Weights that multiply each token; of a stack of experts the share that a token meets.
        num_trained_weights: Those of them whose own gradient is computed.
        attention_width: Heads x (width of a query head + width of a value head).
        window: Keys a query sees; None for all of its document.
        has_backward: Gradients pass through this layer.
    """

    num_active_weights: float
    num_trained_weights: float
    attention_width: int
    window: int | None
    has_backward: bool


class ModelFlops(NamedTuple):
    """The operations that training a model needs, without recomputation (what "model FLOPs utilisation" counts).

    Args:
        layers: One entry per decoder layer.
        num_head_weights: Weights of the output head, met by labelled tokens only.
        is_head_trained: Whether the head's own gradient is computed.
        has_backward: Whether gradients pass from the head into the decoder.
    """

    layers: list[LayerFlops]
    num_head_weights: int
    is_head_trained: bool
    has_backward: bool

    def step_flops(self, *, num_tokens: int, num_labelled: int, sum_squared_lengths: int) -> float:
        """Return the operations of forward and backward over packed documents.

        Args:
            num_tokens: Tokens of the pack.
            num_labelled: Tokens that the loss is computed for; the head runs on those only.
            sum_squared_lengths: Sum over documents of their length squared; half of it are the pairs of a causal
                attention.
        """
        total = self._head_flops(num_labelled)
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

    def _head_flops(self, num_labelled: int) -> float:
        num_products = 1 + self.has_backward + self.is_head_trained
        return float(FLOPS_PER_WEIGHT * self.num_head_weights * num_labelled * num_products)


def count_flops(model: nn.Module, layers: list[nn.Module]) -> ModelFlops:
    """Return what a step of a causal language model costs, from the shapes of its weights.

    Counted are all weights of two and more axes in the decoder layers (linear layers, routers, stacks of experts,
    adapters) and the head; embeddings, norms and element-wise work are not. A frozen weight costs its forward and the
    gradient that passes through it, a trained one its own gradient too; layers below the lowest trained weight have no
    backward.

    Args:
        model: A transformers causal language model, also one that adapters were added to.
        layers: Its decoder layers, in order.

    Cost:
        One walk over the modules on the host; no device work.

    Source:
        2 N forward and 4 N backward per token: Kaplan et al., arXiv 2001.08361; the split for frozen weights is own.
    """
    config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config  # type: ignore[union-attr,operator]
    embedding = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None  # type: ignore[operator]
    has_backward = embedding is not None and any(parameter.requires_grad for parameter in embedding.parameters())
    counted = []
    for index, layer in enumerate(layers):
        num_active, num_trained = _count_weights(layer, config)
        has_backward = has_backward or any(parameter.requires_grad for parameter in layer.parameters())
        counted.append(
            LayerFlops(num_active, num_trained, _attention_width(config), _window(config, index), has_backward)
        )
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None  # type: ignore[operator]
    head_weight = getattr(head, "weight", None)
    return ModelFlops(
        layers=counted,
        num_head_weights=0 if head_weight is None else _num_weights(head, "weight", head_weight),
        is_head_trained=bool(head_weight is not None and head_weight.requires_grad),
        has_backward=has_backward,
    )


def _count_weights(layer: nn.Module, config: Any) -> tuple[float, float]:
    """Weights of a layer that a token meets, and those of them that are trained."""
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
    """Weights of a parameter; a quantised one is stored in fewer elements than it has weights."""
    in_features, out_features = getattr(module, "in_features", None), getattr(module, "out_features", None)
    if name == "weight" and isinstance(in_features, int) and isinstance(out_features, int):
        return in_features * out_features
    return parameter.numel()


def _active_share(path: str, parameter: torch.Tensor, config: Any) -> float:
    """The share of a parameter that one token meets: all of it, or of routed experts those it is sent to."""
    parts = path.split(".")
    if "experts" not in parts:
        return 1.0
    num_active = next((getattr(config, name) for name in _ACTIVE_EXPERT_NAMES if getattr(config, name, None)), None)
    num_experts = parameter.shape[0] if parameter.ndim == 3 else _num_experts(config)
    return 1.0 if not num_active or not num_experts else min(1.0, num_active / num_experts)


def _num_experts(config: Any) -> int | None:
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    return next((getattr(config, name) for name in names if getattr(config, name, None)), None)


def _attention_width(config: Any) -> int:
    num_heads = config.num_attention_heads
    head_width = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    query_width = getattr(config, "qk_head_dim", None) or head_width
    value_width = getattr(config, "v_head_dim", None) or head_width
    return num_heads * (query_width + value_width)


def _window(config: Any, index: int) -> int | None:
    """The sliding window of one layer; None where the layer sees its whole document."""
    window = getattr(config, "sliding_window", None)
    if not window or getattr(config, "use_sliding_window", True) is False:
        return None
    layer_types = getattr(config, "layer_types", None)
    if layer_types is None:
        return window
    return window if index < len(layer_types) and layer_types[index] == "sliding_attention" else None
