"""Give the fused decoder layers of every model inside a module their CUDA graphs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_fastft.fused.decoder import fused_layers, shared_memory
from lightning_fastft.graphs.launch_bound import LaunchBoundProbe
from lightning_fastft.graphs.layer_graphs import LayerGraphs
from lightning_fastft.hf.families import find_causal_models

if TYPE_CHECKING:
    from torch import nn

    from lightning_fastft.core.patcher import ModelPatcher


def install_layer_graphs(root: nn.Module, patcher: ModelPatcher, *, if_launch_bound: bool = False) -> list[LayerGraphs]:
    """Let the fused layers of every model inside root run from CUDA graphs.

    Args:
        root: What install_fused_layers was given.
        patcher: Records the changes and undoes them.
        if_launch_bound: Only where the device turns out to wait for the host.

    Returns:
        One per model with fused layers.
    """
    found = []
    for _, model in find_causal_models(root):
        layers = fused_layers(model)
        if layers:
            found.append(
                LayerGraphs(layers, memory_of=shared_memory, pace=LaunchBoundProbe() if if_launch_bound else None)
            )
            found[-1].install(patcher)
    return found
