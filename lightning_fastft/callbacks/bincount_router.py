"""BincountRouter: route mixture-of-experts layers by one stable sort and one count, under any strategy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_fastft.callbacks.model_swaps import ModelSwaps

if TYPE_CHECKING:
    from torch import nn

    from lightning_fastft.core.patcher import ModelPatcher
    from lightning_fastft.core.status import Status


class BincountRouter(ModelSwaps):
    """Route tokens to experts by one stable sort and one count, without a host sync, in every transformers model.

    A gather, grouped GEMMs, the gate and a weighted sum replace the experts function of transformers; routers,
    parameters and state-dict keys do not change. The callback supports training and evaluation, experts with or without
    adapters, sharded or not, FineTuner and any other LightningModule. All changes are undone when the run ends, also
    after an exception. A dense model is not changed, and the table says so.

    Raises:
        UnsupportedModelError: A model has MoE layers of which none is supported; raised once the model is built.

    Example:
        >>> BincountRouter().status()
        [Status(name='expert router', state='inactive', reason='not installed', remedy='')]
    """

    status_name = "expert router"

    def install(self, root: nn.Module, patcher: ModelPatcher) -> list[Status]:
        """Swap the experts of every model inside root."""
        from lightning_fastft.moe.install import install_bincount_router

        return install_bincount_router(root, patcher)
