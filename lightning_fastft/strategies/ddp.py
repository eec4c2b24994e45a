"""FastFTDDPStrategy: packed training with a whole model on every device."""

from __future__ import annotations

import gc
import operator
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from lightning.pytorch.strategies import DDPStrategy
from torch.nn.parallel import DistributedDataParallel

from lightning_fastft.activations.weights import STREAMED_ATTRIBUTE
from lightning_fastft.strategies.context_parallel import ContextParallelMixin

if TYPE_CHECKING:
    from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
    from lightning.pytorch import Trainer
    from lightning.pytorch.accelerators import Accelerator
    from lightning.pytorch.plugins.precision import Precision
    from torch import nn

    from lightning_fastft.activations.checkpointing import OffloadCheckpointing

# Attribute of a module in which DDP and Lightning look for the names of tensors that they do not broadcast.
_IGNORED = "_ddp_params_and_buffers_to_ignore"


def prepare_for_ddp(model: nn.Module, ddp_kwargs: dict[str, Any]) -> None:
    """Exclude NF4 experts from DDP, because they are equal on every rank and cannot be broadcast.

    A trained image tower has no gradients on ranks whose pack has no image, so ``find_unused_parameters`` is set.
    Changes ddp_kwargs.
    """
    from lightning_fastft.hf.expert_nf4_tensor import ExpertsNF4
    from lightning_fastft.hf.families import tower_parameters

    if any(parameter.requires_grad for parameter in tower_parameters(model)):
        ddp_kwargs.setdefault("find_unused_parameters", True)
    frozen = [name for name, parameter in model.named_parameters() if isinstance(parameter, ExpertsNF4)]
    if frozen:
        ignored = [*getattr(model, _IGNORED, ()), *frozen]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)


def _streamed_weights(model: nn.Module) -> Iterator[str]:
    """Yield the names of the frozen weights in slots or on the host, which are equal on every rank."""
    from lightning_fastft.patches.host_ends import HostEmbedding, HostLinear

    for module_name, module in model.named_modules():
        if hasattr(module, STREAMED_ATTRIBUTE) or isinstance(module, (HostEmbedding, HostLinear)):
            for name, parameter in module.named_parameters(recurse=False):
                if not parameter.requires_grad:
                    yield f"{module_name}.{name}"


def _read_flags(parameters: Iterable[nn.Parameter]) -> list[bool]:
    return list(map(operator.attrgetter("requires_grad"), parameters))


class FastFTDDPStrategy(ContextParallelMixin, DDPStrategy):
    """Train one whole model per device with the features of FastFTStrategy, and average gradients once per step.

    Distribution is Lightning's own. Gradients are all-reduced in the last backward of an accumulation window, and not
    before. If callbacks freeze or unfreeze parameters during the run, the model is wrapped again.

    Args:
        activations: Policy for activations between forward and backward; None is ``OffloadCheckpointing("auto")``.
        attention: Backend of the packed attention; "auto" chooses by device, head shape and longest document.
            "one_by_one" runs the documents of a pack one at a time with the model's own attention: exact for every
            family, and slow.
        exact_resume: Whether to add ExactResume if the Trainer has none. It saves random states in checkpoints, and a
            checkpoint after a signal.
        context_parallel: Devices that share each pack (all-to-all over attention heads), for packs too long for one
            device; it divides the number of devices and of query heads. Batches are distributed over groups of this
            many devices.
        accelerator: As in Lightning.
        cluster_environment: As in Lightning.
        checkpoint_io: As in Lightning.
        precision_plugin: As in Lightning.
        **kwargs: Arguments of Lightning's DDPStrategy: ``process_group_backend``, ``timeout``, ``start_method``, the
            ``ddp_comm_*`` options, and those of torch's DistributedDataParallel, such as ``find_unused_parameters`` and
            ``static_graph``. ``gradient_as_bucket_view`` is True unless given: after the all-reduce, gradients are
            views of the buckets, without a second copy. (There is a second copy while a window accumulates, and if
            layers run from CUDA graphs.)

    Raises:
        OptionError: context_parallel does not divide the number of devices, or does not fit the model or attention.

    Example:
        >>> FastFTDDPStrategy(find_unused_parameters=True).statuses()
        []
    """

    strategy_name = "fastft_ddp"

    def __init__(
        self,
        *,
        activations: OffloadCheckpointing | None = None,
        attention: str = "auto",
        exact_resume: bool = True,
        context_parallel: int = 1,
        accelerator: Accelerator | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        **kwargs: Any,
    ) -> None:
        kwargs.setdefault("gradient_as_bucket_view", True)
        super().__init__(
            activations=activations,
            attention=attention,
            exact_resume=exact_resume,
            context_parallel=context_parallel,
            accelerator=accelerator,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            **kwargs,
        )
        self._is_graph_recorded = False
        self._wrapped: list[nn.Parameter] = []
        self._averaged: list[bool] = []

    def setup(self, trainer: Trainer) -> None:
        """Install packed training, wrap the model and create the optimizer."""
        self._is_graph_recorded = False
        super().setup(trainer)

    def model_to_device(self) -> None:
        """Move the model to the device; exclude from DDP what cannot be broadcast: NF4 experts, streamed weights."""
        super().model_to_device()
        assert self.model is not None
        prepare_for_ddp(self.model, self._ddp_kwargs)
        streamed = list(_streamed_weights(self.model))
        if streamed and self._patcher is not None:
            ignored = [*getattr(self.model, _IGNORED, ()), *streamed]
            self._patcher.set_attribute(self.model, _IGNORED, ignored)

    def configure_ddp(self) -> None:
        """Wrap the model, and record whose gradients are averaged: those of the parameters that are trained now."""
        super().configure_ddp()
        assert self.model is not None
        self._wrapped = list(self.model.parameters())
        self._averaged = _read_flags(self._wrapped)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Wrap the model again if a callback froze or unfroze parameters: DDP would not average new gradients."""
        super().on_train_batch_start(batch, batch_idx)
        if _read_flags(self._wrapped) == self._averaged:
            return
        assert isinstance(self.model, DistributedDataParallel)
        self.model = self.model.module
        self._is_graph_recorded = False
        # The buckets of the first wrapper are in a reference cycle.
        gc.collect()
        self.configure_ddp()

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Skip the all-reduce in all backwards of an accumulation window except the last one.

        torch records a static graph in the first backward of a run, and only if that backward reduces gradients (in
        2.13 an internal assertion fails otherwise). So the first backward is reduced, which changes no sum.
        """
        if self._ddp_kwargs.get("static_graph") and not self._is_graph_recorded:
            self._is_graph_recorded = True
            yield
            return
        with super().block_backward_sync():
            yield
