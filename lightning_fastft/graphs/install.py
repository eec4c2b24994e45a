"""Run the fused decoder layers of every model in a module from CUDA graphs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_fastft.fused.install import fused_layers, shared_memory
from lightning_fastft.graphs.launch_bound import LaunchBoundProbe
from lightning_fastft.graphs.layer_graphs import LayerGraphs
from lightning_fastft.hf.families import find_causal_models

if TYPE_CHECKING:
    from torch import nn

    from lightning_fastft.core.patcher import ModelPatcher


def install_layer_graphs(root: nn.Module, patcher: ModelPatcher, *, if_launch_bound: bool = False) -> list[LayerGraphs]:
    """Run the fused layers of every model in root from CUDA graphs.

    Args:
        root: The module given to install_fused_layers.
        patcher: Records the changes and undoes them.
        if_launch_bound: Record only if training is launch-bound.

    Returns:
        One LayerGraphs per model whose layers are all fused and all have attention. The gated delta rule runs eagerly,
        because the length of its list of chunks changes from pack to pack.
    """
    found = []
    for _, model in find_causal_models(root):
        layers = fused_layers(model)
        if layers and all("self_attn" in layer._modules for layer in layers):
            found.append(
                LayerGraphs(layers, memory_of=shared_memory, pace=LaunchBoundProbe() if if_launch_bound else None)
            )
            found[-1].install(patcher)
    return found
