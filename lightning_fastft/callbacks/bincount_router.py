"""BincountRouter: the experts of mixture models on one stable sort, one count and grouped products, under any
strategy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_fastft.callbacks.model_swaps import ModelSwaps

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from torch import nn

    from lightning_fastft.core.patcher import ModelPatcher
    from lightning_fastft.core.status import Status


class BincountRouter(ModelSwaps):
    """Route tokens to experts by one stable sort and one count, without a host wait, in every transformers model inside
    the LightningModule.

    Gather, grouped products, gate and weighted sum replace the experts function of transformers; routers, parameters
    and state-dict keys stay. Works in training and evaluation, with adapters on the experts or without, for FineTuner
    and for any LightningModule. Everything is taken back at the end and after an exception. A dense model is left
    alone, and the table says so.

    Raises:
        UnsupportedModelError: A model has MoE layers and none can be served, or its experts are sharded (FSDP2); raised
            when the model stands.

    Example:
        >>> BincountRouter().status()
        [Status(name='expert router', state='inactive', reason='not installed', remedy='')]
    """

    status_name = "expert router"

    def install(self, root: nn.Module, patcher: ModelPatcher) -> list[Status]:
        """Swap the experts of every model inside root."""
        from lightning_fastft.moe.install import install_bincount_router

        return install_bincount_router(root, patcher)

    def check_start(self, pl_module: pl.LightningModule) -> None:
        """Refuse experts that were whole when a FineTuner built its model and may have been cut since."""
        from lightning_fastft.moe.install import check_unsharded

        check_unsharded(pl_module)
