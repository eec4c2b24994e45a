"""BincountRouter: compute mixture-of-experts layers by one stable sort and grouped GEMMs, under any strategy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_fastft.callbacks.model_swaps import ModelSwaps

if TYPE_CHECKING:
    from torch import nn

    from lightning_fastft.core.patcher import ModelPatcher
    from lightning_fastft.core.status import Status


class BincountRouter(ModelSwaps):
    """Compute the experts of mixture-of-experts layers by one sort and grouped GEMMs, without a host sync.

    The callback replaces the experts function of every transformers model in the module; the model's own router still
    chooses the experts. One stable sort and one count put the routed tokens in the order of their experts. Grouped
    GEMMs, the gate and a weighted sum follow, in place of a loop over experts. Parameters and state-dict keys do not
    change.

    The name is that of the published optimisation, which orders tokens by one argsort and one ``torch.bincount``. On
    CUDA this package calls neither, because ``torch.bincount`` costs two host syncs: a counting sort does both.

    The callback supports training and evaluation, experts with or without adapters, sharded or not, FineTuner and any
    other LightningModule. All changes are undone when the run ends, also after an exception. A dense model is not
    changed, and the status table says so.

    Raises:
        UnsupportedModelError: A model has MoE layers of which none is supported; raised once the model is built.

    Cost:
        Host work once per run. Each layer sorts in three launches, and then costs what ``run_experts`` costs: the FLOP
        of the chosen experts, the token states and the output of the first product saved for the backward, no copy of
        the expert weights, no host sync.

    Source:
        Unsloth and NVIDIA (2026), unslothai/unsloth-zoo#535; the kernels are own.

    Example:
        >>> BincountRouter().status()
        [Status(name='expert router', state='inactive', reason='not installed', remedy='')]
    """

    status_name = "expert router"

    def install(self, root: nn.Module, patcher: ModelPatcher) -> list[Status]:
        """Swap the experts of every model inside root."""
        from lightning_fastft.moe.install import install_bincount_router

        return install_bincount_router(root, patcher)
