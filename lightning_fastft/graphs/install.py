"""Run the fused decoder layers of every model in a module from CUDA graphs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_fastft.fused.install import fused_layers, shared_memory
from lightning_fastft.graphs.launch_bound import LaunchBoundProbe
from lightning_fastft.graphs.layer_graphs import LayerGraphs
from lightning_fastft.hf.families import find_causal_models
from lightning_fastft.kernels.chunk_gradients.reference import CHUNK

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
        One LayerGraphs per model whose layers are all fused.
    """
    found = []
    for _, model in find_causal_models(root):
        layers = fused_layers(model)
        if layers:
            has_mixers = any("self_attn" not in layer._modules for layer in layers)
            graphs = LayerGraphs(
                layers,
                memory_of=shared_memory,
                chunk_size=CHUNK if has_mixers else None,
                pace=LaunchBoundProbe() if if_launch_bound else None,
            )
            found.append(graphs)
            graphs.install(patcher)
    return found
