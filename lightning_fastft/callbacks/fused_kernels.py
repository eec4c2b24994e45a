"""FusedKernels: decoder layers as a few fused Functions, under any strategy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning.pytorch import LightningModule

from lightning_fastft.callbacks.model_swaps import ModelSwaps
from lightning_fastft.core.checks import check_choice

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from torch import nn

    from lightning_fastft.core.patcher import ModelPatcher
    from lightning_fastft.core.status import Status
    from lightning_fastft.fused.decoder import FusedWeightBuffers
    from lightning_fastft.fused.fp8_base import Fp8Base
    from lightning_fastft.graphs.layer_graphs import LayerGraphs

CUDA_GRAPHS = (False, True, "auto")
BASE_COMPUTES = ("model_dtype", "fp8", "fp8_reference")


class FusedKernels(ModelSwaps):
    """Run decoder layers as a few Functions with hand-written backwards, in every transformers model inside the
    LightningModule.

    Norms with the residual, the projections to q, k and v with their LoRA, the norm and rotation of heads, the output
    projection with the residual, and dense feed-forward blocks are one Function each; what is elementwise is rebuilt in
    the backward instead of being saved. Parameters, state-dict keys and adapter files stay; a call that the Functions
    cannot serve exactly (a cache, autocast, adapters that are no plain LoRA) runs the layer's own forward. Families
    that are not served are left alone, and the table says so. Everything is taken back at the end and after an
    exception.

    On a GPU, frozen weights that are neither quantised nor sharded lie next to their adapters from ``on_fit_start`` to
    ``on_train_end``, so that one product reads both. They are the same parameters with the same values, but their rows
    are a little further apart: checkpoints of Lightning hold them whole, and who writes them with safetensors in that
    time calls ``.contiguous()`` on each.

    Args:
        cuda_graphs: Record the forward and the backward of each layer as CUDA graphs after the first steps, so that a
            step costs the host two launches per layer. For one device or DDP, LoRA without dropout or full fine-tuning,
            packs of one length or two (``PackedDataModule(pad_to_max=True)``), and plans that send nothing to the host;
            anything else runs as ever, and the table says why. Memory that the graphs need stays reserved between
            steps, in validation too. "auto": only where the device is found to wait for the host in two micro-batches
            after the first ones, and has the memory (within ``vram_budget`` where one is given); where recording fails,
            layers run as ever, with a warning.
        base_compute: How the products with frozen weights compute, forward and by the input. "model_dtype": in the
            dtype of the model. "fp8": in e4m3 with a scale for each row, each output column and each row of gradients;
            an approximation (about 3.7 % of a product's norm), so the loss follows that of bf16 nearly but not exactly.
            Adapters, norms, attention, embeddings, the head and whatever is trained stay as ever. For bf16 models on
            Ada, Hopper and Blackwell; elsewhere the layers run in the dtype of the model, and the table says so. NF4
            weights are converted as they are used, dense ones once: two bytes of memory for each of them, beside the
            weights that files, merging and generation read. "fp8_reference": the same numbers in plain PyTorch, on any
            device and slowly, to look at curves.

    Raises:
        OptionError: cuda_graphs or base_compute is another.

    Example:
        >>> FusedKernels().status()
        [Status(name='fused layers', state='inactive', reason='not installed', remedy='')]
    """

    status_name = "fused layers"

    def __init__(self, *, cuda_graphs: bool | str = False, base_compute: str = "model_dtype") -> None:
        super().__init__()
        self.cuda_graphs = check_choice("cuda_graphs", cuda_graphs, CUDA_GRAPHS)
        self.base_compute = check_choice("base_compute", base_compute, BASE_COMPUTES)
        self._graphs: list[LayerGraphs] = []
        self._fp8: list[Fp8Base] = []
        self._weight_buffers: list[FusedWeightBuffers] = []

    def status(self) -> list[Status]:
        """Return what is active, for the table of the run; after the run, what was."""
        return [
            *super().status(),
            *(weight_buffer.status() for weight_buffer in self._weight_buffers),
            *(base.status() for base in self._fp8),
            *(graphs.status() for graphs in self._graphs),
        ]

    def install(self, root: nn.Module, patcher: ModelPatcher) -> list[Status]:
        """Swap the decoder layers of every model inside root."""
        from lightning_fastft.fused.decoder import install_fp8_base, install_fused_layers
        from lightning_fastft.graphs.install import install_layer_graphs

        # A FineTuner hands over its model alone, and makes the narrow copies of fp32 adapters after that.
        statuses = install_fused_layers(root, patcher, awaits_copies=not isinstance(root, LightningModule))
        is_emulated = self.base_compute == "fp8_reference"
        self._fp8 = (
            install_fp8_base(root, patcher, is_emulated=is_emulated) if self.base_compute != "model_dtype" else []
        )
        self._graphs = (
            install_layer_graphs(root, patcher, if_launch_bound=self.cuda_graphs == "auto") if self.cuda_graphs else []
        )
        self._weight_buffers = []
        return statuses

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Install, and move frozen weights next to their adapters, now that the model stands where it computes."""
        from lightning_fastft.fused.decoder import fuse_weight_buffers

        super().on_fit_start(trainer, pl_module)
        if self._patcher is not None and self.is_installed and self.base_compute == "model_dtype":
            self._weight_buffers = fuse_weight_buffers(pl_module, self._patcher)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Give the weights memory of their own again: what follows may merge and write them."""
        for weight_buffer in self._weight_buffers:
            weight_buffer.give_back()

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Write whole weights, without the room for their adapters."""
        for weight_buffer in self._weight_buffers:
            weight_buffer.make_whole(checkpoint.get("state_dict", {}))
