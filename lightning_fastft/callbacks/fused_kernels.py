"""FusedKernels: decoder layers as a few fused Functions, under any strategy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning.pytorch import LightningModule

from lightning_fastft.callbacks.model_swaps import ModelSwaps

if TYPE_CHECKING:
    from torch import nn

    from lightning_fastft.models.swap import SwapLedger
    from lightning_fastft.status import Status


class FusedKernels(ModelSwaps):
    """Run decoder layers as a few Functions with hand-written backwards, in every transformers model inside the LightningModule.

    Norms with the residual, the projections to q, k and v with their LoRA, the norm and rotation of heads, the output projection with the residual,
    and dense feed-forward blocks are one Function each; what is elementwise is built again in the backward instead of being saved. Parameters,
    state-dict keys and adapter files stay; a call that the Functions cannot serve exactly (a cache, autocast, adapters that are no plain LoRA) runs
    the layer's own forward. Families that are not served are left alone, and the table says so. Everything is taken back at the end and after an
    exception.

    Example:
        >>> FusedKernels().status()
        [Status(name='fused layers', state='inactive', reason='not installed', remedy='')]
    """

    status_name = "fused layers"

    def install(self, root: nn.Module, ledger: SwapLedger) -> list[Status]:
        """Swap the decoder layers of every model inside root."""
        from lightning_fastft.models.decoder import install_fused_layers

        # A FineTuner hands over its model alone, and makes the narrow copies of fp32 adapters after that.
        return install_fused_layers(root, ledger, awaits_copies=not isinstance(root, LightningModule))
