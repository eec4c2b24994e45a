"""Use Liger's RMSNorm and SwiGLU in a model of ours: instances are swapped through the patcher, and no class or module
of transformers is patched.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from lightning_fastft.core.patcher import ModelPatcher, share_state

# Norms that compute weight * normalised, in Llama's order of casts; Gemma's (1 + weight) is another formula.
NORM_CLASSES = frozenset({"LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm"})
MLP_CLASSES = frozenset({"LlamaMLP", "MistralMLP", "Qwen2MLP", "Qwen3MLP"})


def install_liger_layers(root: nn.Module, patcher: ModelPatcher) -> dict[str, int]:
    """Swap every norm and gated MLP that Liger has an exact kernel for.

    Args:
        root: The model, before or after adapters.
        patcher: Undoes the swaps.

    Returns:
        The number of swapped norms and MLPs.

    Raises:
        ValueError: Nothing matched.
    """
    counts = {"norms": 0, "mlps": 0}
    for name, module in list(root.named_modules()):
        kind = type(module).__name__
        if kind in NORM_CLASSES:
            patcher.replace_module(root, name, share_state(module, _norm_class(type(module))))
            counts["norms"] += 1
        elif kind in MLP_CLASSES and module.config.hidden_act in ("silu", "swish"):
            patcher.replace_module(root, name, share_state(module, _mlp_class(type(module))))
            counts["mlps"] += 1
    if not all(counts.values()):
        raise ValueError(f"Liger's layers match {counts} of {type(root).__name__}.")
    return counts


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Call Liger's kernel as its own patch of these families does."""
    from liger_kernel.ops import LigerRMSNormFunction

    return LigerRMSNormFunction.apply(x, weight, eps, 0.0, "llama", True, None)


def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Call Liger's kernel for silu(gate) * up."""
    from liger_kernel.ops import LigerSiLUMulFunction

    return LigerSiLUMulFunction.apply(gate, up, 1.0, 1.0)


@functools.cache
def _norm_class(old: type[nn.Module]) -> type[nn.Module]:
    def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        return rms_norm(hidden_states, self.weight, self.variance_epsilon)

    return type(f"Liger{old.__name__}", (old,), {"forward": forward})


@functools.cache
def _mlp_class(old: type[nn.Module]) -> type[nn.Module]:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(silu_mul(self.gate_proj(x), self.up_proj(x)))

    return type(f"Liger{old.__name__}", (old,), {"forward": forward})
