"""Context parallelism: the ranks of a group share each pack; every rank computes a part of its rows.

The model runs on the rows of the part. In attention the group exchanges rows for heads (``patches/part_exchange.py``),
so that each rank computes some heads for the whole pack.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.trainer.states import TrainerFn

from lightning_fastft.core.checks import check_int
from lightning_fastft.core.errors import ContextError, OptionError, UnsupportedModelError
from lightning_fastft.core.status import Status
from lightning_fastft.packing.collate import PackedBatch
from lightning_fastft.packing.context import ONE_BY_ONE
from lightning_fastft.strategies.launchers import refuse_other_size
from lightning_fastft.strategies.mesh import check_mesh
from lightning_fastft.strategies.mixin import FastFTStrategyMixin
from lightning_fastft.strategies.packed_steps import find_packed_batches
from lightning_fastft.strategies.patching import callbacks_of
from lightning_fastft.strategies.rendezvous import explain_rendezvous

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel

AXES = ("replicate", "shard", "context")
STATUS_NAME = "mesh"
# Larger than any cluster.
MOST_DEVICES = 2**20


class ContextParallelMixin(FastFTStrategyMixin):
    """Cut every packed batch into the parts of a context-parallel group; for strategies of several devices.

    The mesh has the axes replicate, shard and context; the ranks of a context group are neighbours. All of them get the
    same pack from the data module, and gradients are averaged over all ranks.

    Args:
        context_parallel: Devices that share each pack.
        **kwargs: Arguments of the parent strategies.

    Raises:
        OptionError: context_parallel is not above 0, or attention runs documents one at a time.
    """

    def __init__(self, *, context_parallel: int = 1, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.context_parallel = check_int("context_parallel", context_parallel, low=1, high=MOST_DEVICES)
        if context_parallel > 1 and self.packed_steps.attention == ONE_BY_ONE:
            raise OptionError(
                f"context_parallel={context_parallel} needs packed attention, and attention={ONE_BY_ONE!r} runs the "
                "documents of a pack one at a time. Leave attention at 'auto'."
            )
        self.mesh: DeviceMesh | None = None
        self._has_compared = False

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """How many groups of devices get different batches, and which of them this device is in."""
        found: dict[str, Any] = super().distributed_sampler_kwargs  # type: ignore[misc]
        return {name: value // self.context_parallel for name, value in found.items()}

    def _configure_launcher(self) -> None:
        """Refuse a size that is not that of the job, before anything is started."""
        environment, num_devices = self.cluster_environment, self.num_processes  # type: ignore[attr-defined]
        refuse_other_size(environment, num_devices=num_devices, num_nodes=self.num_nodes)  # type: ignore[attr-defined]
        super()._configure_launcher()

    def setup_environment(self) -> None:
        """Check the sizes, join the other ranks, and open the mesh.

        Raises:
            OptionError: The number of devices is not a multiple of context_parallel.
            RendezvousError: The other ranks did not join in time.
        """
        world_size = self._count_devices()
        environment, num_devices = self.cluster_environment, self.num_processes  # type: ignore[attr-defined]
        with explain_rendezvous(environment, num_ranks=world_size, num_devices=num_devices):
            super().setup_environment()
        if self.context_parallel > 1:
            from torch.distributed.device_mesh import init_device_mesh

            num_shards = self._num_shards()
            shape = (world_size // num_shards, num_shards // self.context_parallel, self.context_parallel)
            self.mesh = init_device_mesh(self.root_device.type, shape, mesh_dim_names=AXES)

    def _count_devices(self) -> int:
        """Return the number of devices of all machines; refuse one that context_parallel does not divide."""
        world_size: int = self.num_nodes * self.num_processes  # type: ignore[attr-defined]
        check_mesh(world_size, context_parallel=self.context_parallel)
        return world_size

    def _num_shards(self) -> int:
        """Return the number of devices over which one copy of the weights is sharded."""
        return self.context_parallel

    def setup(self, trainer: Trainer) -> None:
        """Check that the model and the callbacks can train on parts of packs, and install packed training.

        Raises:
            OptionError: A callback, or the kind of run, works on whole packs only.
            UnsupportedModelError: The model, or the tuner, cannot be trained exactly on parts of packs.
        """
        self._has_compared = False
        if self.context_parallel > 1:
            assert self.lightning_module is not None
            check_run(trainer, size=self.context_parallel)
            check_module(self.lightning_module, size=self.context_parallel)
        super().setup(trainer)
        if self.context_parallel > 1:
            check_head(self.packed_steps.statuses(), size=self.context_parallel)

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Copy this rank's part of a batch to the device.

        Raises:
            ContextError: The batch is not packed, or the ranks of a group have different packs.
        """
        if self.context_parallel > 1:
            if not find_packed_batches(batch):
                raise ContextError(
                    f"context_parallel={self.context_parallel} cuts packed batches, and got a "
                    f"{type(batch).__name__}. Use PackedDataModule or collate, or set context_parallel=1."
                )
            batch = _map_packed(batch, self._cut)
        return super().batch_to_device(batch, device, dataloader_idx)

    def agree(self, value: Any) -> Any:
        """Return the value of the first rank of the context group, or of rank 0 if packs are not shared."""
        if self.mesh is None:
            return self.broadcast(value)
        found = [value]
        torch.distributed.broadcast_object_list(found, group=self.mesh.get_group("context"), group_src=0)
        return found[0]

    def statuses(self) -> list[Status]:
        """Return the statuses, with the mesh first."""
        own = super().statuses()
        if self.mesh is None:
            return own
        sizes = " x ".join(f"{name} {self.mesh.size(number)}" for number, name in enumerate(AXES))
        reason = f"{self.mesh.size()} devices: {sizes}; {self.context_parallel} devices share each pack"
        return [Status(STATUS_NAME, "active", reason), *own]

    def _cut(self, batch: PackedBatch) -> PackedBatch:
        assert self.mesh is not None
        group, rank = self.mesh.get_group("context"), self.mesh.get_local_rank("context")
        if not self._has_compared:
            self._compare(batch, group)
        part = batch.cut(rank, num_parts=self.context_parallel, group=group)
        # Rows and labels of the part are new; a copy from pageable memory would be a host sync.
        return part.pin_memory() if self.root_device.type == "cuda" else part

    def _compare(self, batch: PackedBatch, group: Any) -> None:
        """Raise unless the ranks of the group have the same pack; once per run, for loaders of a user."""
        own = (batch.context.lengths, batch["input_ids"].tolist())
        found: list[Any] = [None] * self.context_parallel
        torch.distributed.all_gather_object(found, own, group=group)
        self._has_compared = True
        if any(other != own for other in found):
            raise ContextError(
                f"The {self.context_parallel} ranks of a context-parallel group got different packs. Give all of them "
                "the same one, as PackedDataModule does: rank r reads the share r // context_parallel."
            )


def check_run(trainer: Trainer, *, size: int) -> None:
    """Refuse runs that need whole packs.

    Raises:
        OptionError: It is a prediction, or layers would run from CUDA graphs.
    """
    if trainer.state.fn == TrainerFn.PREDICTING:
        raise OptionError(f"trainer.predict reads whole packs. Set context_parallel=1 instead of {size} for it.")
    refuse_cuda_graphs(trainer, f"context_parallel={size} exchanges heads")


def refuse_cuda_graphs(trainer: Trainer, exchange: str) -> None:
    """Refuse layers that run from CUDA graphs.

    Raises:
        OptionError: The message begins with the exchange between ranks that is not recorded.
    """
    if any(getattr(callback, "cuda_graphs", False) for callback in callbacks_of(trainer)):
        raise OptionError(
            f"{exchange} inside of each layer, which CUDA graphs do not record. Set FusedKernels(cuda_graphs=False)."
        )


def check_module(module: nn.Module, *, size: int) -> None:
    """Refuse models that need the rows of other parts outside of attention.

    Raises:
        UnsupportedModelError: The message names the model and the reason.
    """
    from lightning_fastft.hf.families import find_causal_models

    name = type(module).__name__
    if not getattr(module, "trains_on_parts", True):
        raise UnsupportedModelError(
            f"{name} needs whole packs, so it cannot be trained with context_parallel={size}. Set context_parallel=1; "
            "FineTuner takes it."
        )
    models = find_causal_models(module)
    if not models:
        raise UnsupportedModelError(
            f"context_parallel={size} needs a transformers model, and {name} holds none. Set context_parallel=1."
        )
    for _, model in models:
        obstacle = _find_obstacle(model, size=size)
        if obstacle is not None:
            reason, remedy = obstacle
            raise UnsupportedModelError(
                f"{type(model).__name__} ({model.config.model_type}) {reason}, so it cannot be trained with "
                f"context_parallel={size}. {remedy}."
            )


def check_head(statuses: list[Status], *, size: int) -> None:
    """Refuse a model whose loss head is not lazy: its own loss would miss labels at the ends of parts.

    Raises:
        UnsupportedModelError: The message has the reason.
    """
    for status in statuses:
        if status.name.startswith("loss head") and status.state != "active":
            raise UnsupportedModelError(
                f"context_parallel={size} needs the loss head of this package, which is {status.state}: "
                f"{status.reason}. {status.remedy}".rstrip()
            )


def _find_obstacle(model: PreTrainedModel, *, size: int) -> tuple[str, str] | None:
    """Return why a model cannot be trained on parts of packs, and what to change; None if it can."""
    from lightning_fastft.hf.families import find_decoder, tower_parameters
    from lightning_fastft.hf.mixers import mixer_family

    config: Any = model.config.get_text_config(decoder=True)
    num_heads = getattr(config, "num_attention_heads", size)
    counts = num_heads if isinstance(num_heads, (list, tuple)) else [num_heads]
    if any(count % size for count in counts):
        heads = ", ".join(map(str, sorted(set(counts))))
        return f"has {heads} query heads, which {size} devices cannot share equally", "Use a divisor of that number"
    whole_packs = "Set context_parallel=1"
    if mixer_family(model) is not None:
        return "has recurrent mixers, whose state runs through all parts of a pack", whole_packs
    if tower_parameters(model):
        return "has an image or audio tower, whose outputs belong to rows of several parts", whole_packs
    if getattr(config, "output_router_logits", False):
        reason = "adds an auxiliary loss of its routers over the tokens of a pack"
        return reason, "Set config.output_router_logits=False"
    if any(getattr(part, "attn_temperature_tuning", False) for part in find_decoder(model).modules()):
        return "scales queries by their row in the pack (attn_temperature_tuning)", whole_packs
    return None


def _map_packed(batch: Any, change: Callable[[PackedBatch], PackedBatch]) -> Any:
    """Return a batch with its packed batches changed (``find_packed_batches``)."""
    if isinstance(batch, PackedBatch):
        return change(batch)
    if isinstance(batch, Mapping):
        return {name: _map_packed(member, change) for name, member in batch.items()}
    if isinstance(batch, (list, tuple)):
        members = [_map_packed(member, change) for member in batch]
        return tuple(members) if isinstance(batch, tuple) else members
    return batch
