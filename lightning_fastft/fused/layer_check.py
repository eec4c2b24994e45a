"""Compare the forward of a decoder layer with its fused form, on a small layer of its class.

Axes: T tokens, C channels of a convolution, H heads, W columns of a head.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers
from torch import nn

from lightning_fastft.kernels.delta_inputs.reference import DeltaInputs
from lightning_fastft.mixers.gated_delta import delta_rule_by_document
from lightning_fastft.mixers.kernels import run_on_kernels
from lightning_fastft.packing.context import BatchContext
from lightning_fastft.patches.attention import NAME as ATTENTION_NAME

# Sizes of the small layer; all other values of the configuration are kept.
_SIZES = {
    "hidden_size": 24,
    "intermediate_size": 16,
    "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 8,
    "num_experts": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
}
_LENGTHS = (3, 5)
# In fp32 the two differ by rounding only; another formula differs by far more.
_BOUND = 1e-4


def find_difference(
    kind: type[Any], config: Any, *, index: int, fuse: Callable[[nn.Module], nn.Module], is_dense: bool
) -> str:
    """Return how the forward of a class of layers differs from its fused form, or "".

    A layer of the class with small random weights runs both ways on two packed documents, in fp32 on the CPU. Both use
    plain PyTorch instead of the kernels of a gated delta rule. ``fuse`` returns the fused layer that shares the
    parameters of a layer. If not is_dense, feed-forward blocks run as modules and are not compared.

    Cost:
        Tens of milliseconds of the host; no random state is used.
    """
    config = copy.deepcopy(config)
    for name in _SIZES.keys() & vars(config).keys():
        setattr(config, name, _SIZES[name])
    name = f"{kind.__name__} of transformers {transformers.__version__}"
    try:
        with torch.device("cpu"):
            own, fused = _run_both_ways(kind, config, index=index, fuse=fuse, is_dense=is_dense)
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        return f"the forward of {name} cannot be compared with its fused form ({type(error).__name__}: {error})"
    difference = float((own - fused).norm() / own.norm())
    return "" if difference <= _BOUND else f"{name} computes another result than its fused form"


def _run_both_ways(
    kind: type[Any], config: Any, *, index: int, fuse: Callable[[nn.Module], nn.Module], is_dense: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs of a small layer from its own forward and from its fused form."""
    generator = torch.Generator().manual_seed(0)
    with torch.device("meta"):
        layer = kind(config, index)
    if not is_dense:
        layer.mlp = nn.Identity()
    layer = layer.to_empty(device="cpu").float().eval()
    for parameter in layer.parameters():
        parameter.data.normal_(0.0, 0.3, generator=generator)
        parameter.requires_grad_(False)
    context = BatchContext(lengths=_LENGTHS, label_T=torch.full((sum(_LENGTHS),), -100), num_items=1)
    x_1TD = torch.randn(1, sum(_LENGTHS), config.hidden_size, generator=generator)
    width = int(config.head_dim * config.rope_parameters.get("partial_rotary_factor", 1.0))
    angle_1TW = torch.randn(1, sum(_LENGTHS), width // 2, generator=generator).repeat(1, 1, 2)
    angles = angle_1TW.cos(), angle_1TW.sin()
    mixer = layer._modules.get("linear_attn")
    mask = None if mixer is not None else context.dense_mask(dtype=torch.float32)
    if mixer is not None:
        functions: dict[str, Callable[..., Any]] = {
            "causal_conv1d_fn": _convolve,
            "torch_chunk_gated_delta_rule": _gated_delta_rule,
        }
        mixer.forward = partial(run_on_kernels, mixer, functions, context=context)
    config._attn_implementation = "eager"
    own = layer(hidden_states=x_1TD, position_embeddings=angles, attention_mask=mask)
    if mixer is not None:
        del mixer.forward
    config._attn_implementation = ATTENTION_NAME
    fused = fuse(layer)(hidden_states=x_1TD, position_embeddings=angles, context=context)
    return own, fused


def _convolve(
    x_1CT: torch.Tensor,
    weight_CK: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    *,
    context: BatchContext,
    **keywords: Any,
) -> torch.Tensor:
    """Compute transformers' ``causal_conv1d_fn`` with silu, each document from zeros."""
    parts = [nn.functional.pad(x, (weight_CK.shape[1] - 1, 0)) for x in x_1CT.split(context.lengths, dim=2)]
    parts = [nn.functional.conv1d(x, weight_CK[:, None], bias, groups=len(weight_CK)) for x in parts]
    assert activation == "silu"
    return nn.functional.silu(torch.cat(parts, dim=2))


def _gated_delta_rule(
    query_1THW: torch.Tensor,
    key_1THW: torch.Tensor,
    value_1THW: torch.Tensor,
    *,
    g: torch.Tensor,
    beta: torch.Tensor,
    use_qk_l2norm_in_kernel: bool,
    context: BatchContext,
    **keywords: Any,
) -> tuple[torch.Tensor, None]:
    """Compute transformers' ``torch_chunk_gated_delta_rule``, each document from an empty state."""
    assert use_qk_l2norm_in_kernel
    q, k = (x[0] * torch.rsqrt(x[0].square().sum(-1, keepdim=True) + 1e-6) for x in (query_1THW, key_1THW))
    return delta_rule_by_document(DeltaInputs(q, k, value_1THW[0], g[0], beta[0]), context.lengths)[None], None
