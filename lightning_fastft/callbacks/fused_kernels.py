"""FusedKernels: decoder layers as a few fused Functions, under any strategy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning.pytorch import LightningModule

from lightning_fastft.callbacks.model_swaps import ModelSwaps
from lightning_fastft.checks import check_bool

if TYPE_CHECKING:
    from torch import nn

    from lightning_fastft.models.layer_graphs import LayerGraphs
    from lightning_fastft.models.swap import SwapLedger
    from lightning_fastft.status import Status


class FusedKernels(ModelSwaps):
    """Run decoder layers as a few Functions with hand-written backwards, in every transformers model inside the LightningModule.

    Norms with the residual, the projections to q, k and v with their LoRA, the norm and rotation of heads, the output projection with the residual,
    and dense feed-forward blocks are one Function each; what is elementwise is built again in the backward instead of being saved. Parameters,
    state-dict keys and adapter files stay; a call that the Functions cannot serve exactly (a cache, autocast, adapters that are no plain LoRA) runs
    the layer's own forward. Families that are not served are left alone, and the table says so. Everything is taken back at the end and after an
    exception.

    Args:
        cuda_graphs: Record the forward and the backward of each layer as CUDA graphs after the first steps, so that a step costs the host two
            launches per layer. For one device, LoRA without dropout or full fine-tuning, packs of one length or two
            (``PackedDataModule(pad_to_max=True)``), and plans that send nothing to the host; anything else runs as ever, and the table says why.
            Memory that the graphs need stays reserved between steps, in validation too.

    Raises:
        OptionError: cuda_graphs is neither True nor False.

    Example:
        >>> FusedKernels().status()
        [Status(name='fused layers', state='inactive', reason='not installed', remedy='')]
    """

    status_name = "fused layers"

    def __init__(self, *, cuda_graphs: bool = False) -> None:
        super().__init__()
        self.cuda_graphs = check_bool("cuda_graphs", cuda_graphs)
        self._graphs: list[LayerGraphs] = []

    def status(self) -> list[Status]:
        """Return what is active, for the table of the run; after the run, what was."""
        return [*super().status(), *(graphs.status() for graphs in self._graphs)]

    def install(self, root: nn.Module, ledger: SwapLedger) -> list[Status]:
        """Swap the decoder layers of every model inside root."""
        from lightning_fastft.models.decoder import install_fused_layers, install_layer_graphs

        # A FineTuner hands over its model alone, and makes the narrow copies of fp32 adapters after that.
        statuses = install_fused_layers(root, ledger, awaits_copies=not isinstance(root, LightningModule))
        self._graphs = install_layer_graphs(root, ledger) if self.cuda_graphs else []
        return statuses
