"""FusedKernels: run decoder layers as a few fused autograd Functions, under any strategy."""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningModule

from lightning_fastft.callbacks.model_swaps import ModelSwaps
from lightning_fastft.core.checks import check_choice
from lightning_fastft.core.cores import count_usable_cores
from lightning_fastft.core.phases import LOGGER
from lightning_fastft.core.status import Status
from lightning_fastft.kernels.compilation import Compilation
from lightning_fastft.strategies.patching import callbacks_of

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from torch import nn

    from lightning_fastft.core.patcher import ModelPatcher
    from lightning_fastft.estimate.meta_model import Swaps
    from lightning_fastft.fused.fp8_base import Fp8Base
    from lightning_fastft.fused.install import FusedWeightBuffers
    from lightning_fastft.graphs.layer_graphs import LayerGraphs
    from lightning_fastft.moe.fp8_experts import Fp8Experts

# Threads that compile kernels while the model is read; more would only wait for Python's lock.
_MOST_THREADS = 8
CUDA_GRAPHS = (False, True, "auto")
BASE_COMPUTES = ("model_dtype", "fp8", "fp8_reference")


class FusedKernels(ModelSwaps):
    """Run the decoder layers of every transformers model in the LightningModule as fused autograd Functions.

    Each of these parts runs as one Function: the norm with its residual and the q, k and v projections with their LoRA,
    the norm and rotation of heads, the output projection with its residual, and the dense feed-forward block.
    Elementwise results are recomputed in the backward instead of saved. Parameters, state-dict keys and adapter files
    do not change. A call that the Functions cannot compute exactly (a cache, autocast, adapters other than LoRA and
    DoRA) runs the layer's own forward. Unsupported families keep their layers, and the status table says so. All
    changes are undone when the run ends, also after an exception.

    On a GPU, the kernels of a FineTuner's run are compiled in threads while it reads its model: its layers run on the
    meta device first, which shows what they launch. Kernels that fail there are compiled at their first launch.

    On a GPU, frozen weights that are neither quantised nor sharded share a padded buffer with their adapters from
    ``on_fit_start`` to ``on_train_end``, so that one GEMM reads both. Parameters and values stay the same, but the rows
    have a larger stride. Lightning checkpoints contain contiguous weights; call ``.contiguous()`` on each weight before
    you write it with safetensors during that time.

    Args:
        cuda_graphs: Record the forward and backward of each layer as CUDA graphs after the first steps, so that the
            host launches two graphs per layer and step. Requires one device or DDP, LoRA without dropout or full
            fine-tuning, and a plan without offload; otherwise the layers run without graphs and the table says why.
            Packs of many lengths run from few recordings, with rows of zeros behind their tokens. Graph memory stays
            reserved between steps, also in validation. "auto": record only if training is launch-bound in two
            micro-batches after the first ones and the memory suffices (within ``vram_budget`` if one is given). If
            recording fails, a warning is logged and the layers run without graphs.
        base_compute: How products with the weights of linear layers are computed: in the forward, in the gradient of
            the input and, if the weights are trained, in their gradient. "model_dtype": in the dtype of the model.
            "fp8": in e4m3 with one scale per row, per output column and per row of gradients. This is an approximation
            (about 3.7 % of a product's norm), so the loss follows the bf16 loss closely but not exactly. Adapters,
            norms, attention, embeddings and the head keep their dtype, and so do trained weights, their gradients and
            the optimizer. Frozen experts that BincountRouter runs compute in e4m3 too, with one scale per expert.
            Requires a bf16 model on Ada, Hopper or Blackwell; otherwise the layers run in the dtype of the model and
            the table says so. NF4 weights are converted on use; frozen dense weights and experts once, for two more
            bytes per weight; trained weights after each optimizer step, for one more byte. Files, merging and
            generation read the original weights. Under FSDP2 frozen dense weights are sharded and gathered in e4m3, one
            byte per weight, and the original shards are in host memory until the run ends, if it has room; other
            weights compute in the dtype of the model there, and generation during the run is an error. "fp8_reference":
            the same numbers in plain PyTorch on any device, slowly, to compare loss curves.

    Raises:
        OptionError: cuda_graphs or base_compute has another value.

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
        # Whether a validation was since the last micro-batch.
        self._is_validated = False
        self._fp8_experts: list[Fp8Experts] = []
        self._weight_buffers: list[FusedWeightBuffers] = []
        self._compilation: Compilation | None = None

    def status(self) -> list[Status]:
        """Return the statuses for the table of the run, also after the run."""
        return [
            *super().status(),
            *(weight_buffer.status() for weight_buffer in self._weight_buffers),
            *(base.status() for base in self._fp8),
            *(experts.status() for experts in self._fp8_experts),
            *(graphs.status() for graphs in self._graphs),
        ]

    @property
    def num_recordings(self) -> int:
        """Number of layer recordings so far, replaced ones included."""
        return sum(graphs.num_recordings for graphs in self._graphs)

    def install(self, root: nn.Module, patcher: ModelPatcher) -> list[Status]:
        """Swap the decoder layers of every model inside root."""
        from lightning_fastft.fused.fp8_base import STATUS_NAME as FP8_STATUS
        from lightning_fastft.fused.install import install_fp8_base, install_fused_layers
        from lightning_fastft.graphs.install import install_layer_graphs
        from lightning_fastft.graphs.layer_graphs import STATUS_NAME as GRAPHS_STATUS
        from lightning_fastft.hf.families import find_compiled
        from lightning_fastft.moe.install import install_fp8_experts

        compiled = find_compiled(root)
        if compiled:
            reason = f"torch.compile traces {compiled} as a whole, and a traced layer runs transformers' forward"
            return [Status(self.status_name, "refused", reason, "compile only your own modules outside of the model")]
        # A FineTuner passes only its model, and makes low-precision copies of fp32 adapters later.
        statuses = install_fused_layers(root, patcher, awaits_copies=not isinstance(root, LightningModule))
        is_emulated = self.base_compute == "fp8_reference"
        self._fp8, self._fp8_experts = [], []
        if self.base_compute != "model_dtype":
            self._fp8 = install_fp8_base(root, patcher, is_emulated=is_emulated)
            self._fp8_experts = install_fp8_experts(root, patcher, is_emulated=is_emulated)
        self._graphs = (
            install_layer_graphs(root, patcher, if_launch_bound=self.cuda_graphs == "auto") if self.cuda_graphs else []
        )
        self._weight_buffers = []
        reason = "needs decoder layers that are fused as a whole, attention included"
        if self.base_compute != "model_dtype" and not self._fp8:
            statuses.append(Status(FP8_STATUS, "inactive", reason))
        if self.cuda_graphs and not self._graphs:
            statuses.append(Status(GRAPHS_STATUS, "inactive", reason))
        return statuses

    def before_model(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to compile kernels, on a GPU."""
        if trainer.strategy.root_device.type == "cuda":
            self._compile_ahead(trainer, pl_module)

    def _compile_ahead(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Compile the kernels of the run in threads, if its model is still to be read."""
        from lightning_fastft.estimate.rehearsal import record_launches
        from lightning_fastft.hf.dtypes import DTYPES

        module: Any = pl_module
        num_tokens = getattr(getattr(trainer, "datamodule", None), "max_tokens", None)
        if getattr(module, "source", None) is None or module.model is not None or num_tokens is None:
            return
        # A thread has its own default device and modes, and whatever a model raises there is no error of the run.
        with ThreadPoolExecutor(1) as pool:
            recording = pool.submit(
                record_launches,
                module.source,
                num_tokens=num_tokens,
                quantization=module.quantization,
                lora=module.lora,
                dtype=DTYPES.get(module.dtype_name, torch.bfloat16),
                swaps=swaps_of(trainer),
            )
        error = recording.exception()
        if error is not None:
            LOGGER.info(f"kernels are compiled at their first launch: {error!r:.300}")
            return
        # torchrun sets OMP_NUM_THREADS=1, which is not meant for compilers.
        num_threads = min(_MOST_THREADS, max(1, count_usable_cores() // max(1, trainer.num_devices)))
        self._compilation = Compilation(
            recording.result(), device=trainer.strategy.root_device, num_threads=num_threads
        )
        assert self._patcher is not None
        self._patcher.add_undo(self._compilation.cancel)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Install, and move frozen weights into buffers with their adapters; the model is on its device now."""
        from lightning_fastft.fused.install import fuse_weight_buffers

        super().on_fit_start(trainer, pl_module)
        if self._patcher is not None and self.is_installed and self.base_compute == "model_dtype":
            self._weight_buffers = fuse_weight_buffers(pl_module, self._patcher)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Install, and quantise sharded weights; a checkpoint is loaded by now."""
        self._await_kernels()
        super().on_validation_start(trainer, pl_module)
        self._shard_fp8(trainer)

    on_test_start = on_predict_start = on_sanity_check_start = on_validation_start

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Quantise trained and sharded weights now, so that the activation plan counts them, and trained weights after
        each optimizer step.
        """
        self._await_kernels()
        if self._patcher is None:
            return
        self._shard_fp8(trainer)
        for experts in self._fp8_experts:
            experts.prepare()
        for base in self._fp8:
            base.prepare()
            for optimizer in trainer.optimizers:
                hook = optimizer.register_step_post_hook(functools.partial(_refresh, base))
                self._patcher.add_undo(hook.remove)

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Quantise trained weights before the first batch: another callback may have swapped an average in."""
        if batch_idx == 0:
            self._refresh_fp8()

    on_test_batch_start = on_predict_batch_start = on_validation_batch_start

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note that an average may be swapped back."""
        self._is_validated = True

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Quantise trained weights after a validation."""
        if self._is_validated:
            self._is_validated = False
            self._refresh_fp8()

    def _refresh_fp8(self) -> None:
        # Scales that are allocated in a validation may be saved for a backward later.
        with torch.inference_mode(mode=False), torch.no_grad():
            for base in self._fp8:
                base.refresh()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Make the weights contiguous again, because they may be merged or written next."""
        for weight_buffer in self._weight_buffers:
            weight_buffer.give_back()

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Write contiguous weights, without the padding for their adapters."""
        for weight_buffer in self._weight_buffers:
            weight_buffer.make_whole(checkpoint.get("state_dict", {}))

    def _await_kernels(self) -> None:
        """Wait until the kernels of the first step are compiled."""
        if self._compilation is not None:
            self._compilation.wait()
            self._compilation = None

    def _shard_fp8(self, trainer: Trainer) -> None:
        """Let FSDP2 gather frozen weights in e4m3."""
        from lightning_fastft.activations.budgets import auto_host_bytes

        assert self._patcher is not None
        for base in self._fp8:
            base.shard(self._patcher, host_bytes=auto_host_bytes() // max(1, trainer.num_devices))


def swaps_of(trainer: Trainer) -> Swaps:
    """Return what the callbacks and the strategy of a run change in its layers."""
    from lightning_fastft.callbacks.bincount_router import BincountRouter
    from lightning_fastft.estimate.meta_model import Swaps

    callbacks = callbacks_of(trainer)
    fused = next((callback for callback in callbacks if isinstance(callback, FusedKernels)), None)
    checkpointing = getattr(trainer.strategy, "checkpointing", None)
    return Swaps(
        is_fused=fused is not None,
        is_graphed=False if fused is None else fused.cuda_graphs,
        is_fp8=fused is not None and fused.base_compute == "fp8",
        has_router=any(isinstance(callback, BincountRouter) for callback in callbacks),
        mlp_tiles=getattr(checkpointing, "mlp_tiles", 1),
    )


def _refresh(base: Fp8Base, *_: Any) -> None:
    base.refresh()
