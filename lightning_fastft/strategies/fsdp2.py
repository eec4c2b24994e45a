"""FastFTFSDPStrategy: packed training with one model sharded over all devices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_fastft.core.checks import check_choice, check_int, check_string
from lightning_fastft.core.errors import OptionError, list_names
from lightning_fastft.core.status import Status
from lightning_fastft.strategies.context_parallel import MOST_DEVICES
from lightning_fastft.strategies.folder_checkpoints import FolderCheckpointStrategy
from lightning_fastft.strategies.mesh import check_mesh
from lightning_fastft.strategies.patching import callbacks_of

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from torch.distributed.device_mesh import DeviceMesh
    from torch.optim import Optimizer

    from lightning_fastft.activations.checkpointing import OffloadCheckpointing
    from lightning_fastft.hf.sharding.replicas import ReplicatedParameters

# Precisions that Lightning's ModelParallelStrategy supports. Lightning 2.6.6 checks them for an instance, but not for a
# strategy given by name.
_PRECISIONS = ("32-true", "bf16-mixed", "bf16-true", "16-true")


# Optimizers with operations in place that torch (2.13) does not run on shards.
_NOT_SHARDED = (torch.optim.Adafactor, torch.optim.Rprop)


class FastFTFSDPStrategy(FolderCheckpointStrategy):
    """Train with FSDP2: shard weights, gradients and optimizer state, and gather one decoder layer at a time.

    Distribution is torch's and Lightning's own. Every device is a data-parallel rank unless the sizes say otherwise. A
    FineTuner is built sharded, so that no device ever holds the whole model. Your own module must build its model in
    ``configure_model`` (Lightning's rule for this kind of strategy), and may shard it there with ``fully_shard`` over
    ``self.device_mesh["data_parallel"]``. A transformers model that is not sharded there is sharded by the strategy
    before the optimizer is created, each tensor in its own dtype.

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
        expert_parallel: Devices that own the experts of each mixture-of-experts layer in equal shares, and exchange
            tokens instead of gathering expert weights: 1, or the number of devices that shard one copy of the
            weights (shard). It needs the callback BincountRouter.
        data_parallel_size: Number of devices over which the model is sharded and the batches are distributed, context
            groups included; "auto" is the number of devices divided by tensor_parallel_size.
        tensor_parallel_size: Number of devices that share each matrix product; "auto" is the number of devices divided
            by data_parallel_size, and 1 if that is "auto" too. Above 1 only for a module that applies tensor
            parallelism itself.
        shard: Devices over which one copy of the weights is sharded: "auto" for all data-parallel devices, "node" for
            those of one machine, or a number that divides them (a multiple of context_parallel). With fewer than all,
            each group holds a copy, and gradients are reduced inside a group and then between the groups (hybrid
            sharding). Weights are then gathered over the faster links of a machine.
        adapters: "replicate" holds LoRA factors whole on every device where nothing else is trained, with their
            gradients and moments (16 bytes per weight), and averages their gradients in one all-reduce; layers of
            frozen weights then reduce nothing and can stay gathered (``OffloadCheckpointing(weights=...)``). "shard"
            shards them with their layer. "auto" shards them if experts have LoRA factors, of which there are as
            many as experts, and replicates them otherwise.
        gradient_sync: "window" reduces gradients once per optimizer step; inside an accumulation window every device
            holds the unsharded gradients of all trained weights. "batch" reduces them after each micro-batch and holds
            only shards.
        save_distributed_checkpoint: True writes a folder with one file per rank, False one file with the whole state.
        async_save: Whether saves of folders during ``fit`` hold the step only while the shards are copied to host
            memory. A thread writes them; a checkpoint counts once it is committed, and its errors are raised at the
            next save or at the end. The next save, the end of the run and the removal of an older checkpoint wait.
            Without room for the copies (half of the free host memory, shared by the ranks of a machine) a save is
            synchronous, with a warning.
        process_group_backend: As in Lightning.
        timeout: As in Lightning.

    Raises:
        OptionError: A choice is unknown, the sizes do not fit the number of devices or the module, or the Trainer's
            precision is not supported.

    Cost:
        In each step, every layer is gathered in the forward and again in the backward, unless it stays gathered;
        "window" adds the memory of the unsharded gradients.

    Source:
        Zero redundancy, stage 3: arXiv 1910.02054, through torch's ``fully_shard``.

    Example:
        >>> FastFTFSDPStrategy(save_distributed_checkpoint=False).statuses()
        []
    """

    strategy_name = "fastft_fsdp"

    def __init__(
        self,
        *,
        activations: OffloadCheckpointing | None = None,
        attention: str = "auto",
        exact_resume: bool = True,
        context_parallel: int = 1,
        expert_parallel: int = 1,
        data_parallel_size: Literal["auto"] | int = "auto",
        tensor_parallel_size: Literal["auto"] | int = "auto",
        shard: Literal["auto", "node"] | int = "auto",
        adapters: Literal["auto", "replicate", "shard"] = "auto",
        gradient_sync: Literal["window", "batch"] = "window",
        save_distributed_checkpoint: bool = True,
        async_save: bool = True,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
    ) -> None:
        super().__init__(
            activations=activations,
            attention=attention,
            exact_resume=exact_resume,
            context_parallel=context_parallel,
            expert_parallel=expert_parallel,
            data_parallel_size=data_parallel_size,
            tensor_parallel_size=tensor_parallel_size,
            save_distributed_checkpoint=save_distributed_checkpoint,
            async_save=async_save,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )
        check_choice("adapters", adapters, ("auto", "replicate", "shard"))
        self.adapters = adapters
        self.gradient_sync = check_choice("gradient_sync", gradient_sync, ("window", "batch"))
        for name, size in (("data_parallel_size", data_parallel_size), ("tensor_parallel_size", tensor_parallel_size)):
            if size != "auto":
                check_int(name, size, low=1, high=MOST_DEVICES)
        if shard not in ("auto", "node"):
            check_int("shard", shard, low=1, high=MOST_DEVICES)  # type: ignore[arg-type]
        self.shard = shard
        if process_group_backend is not None:
            check_string("process_group_backend", process_group_backend)
        if timeout is not None and not (isinstance(timeout, timedelta) and timeout > timedelta(0)):
            raise OptionError(f"timeout must be a timedelta above 0, got {timeout!r}.")
        self._sharding: Status | None = None
        self._replicated: ReplicatedParameters | None = None
        self._sharding_mesh: DeviceMesh | None = None

    @property
    def sharding_mesh(self) -> DeviceMesh:
        """The mesh over which a model is sharded: one axis, or two (replicate, shard) for hybrid sharding."""
        return self.device_mesh["data_parallel"] if self._sharding_mesh is None else self._sharding_mesh

    def setup_environment(self) -> None:
        """Check the precision, choose the sizes of the mesh, then start the process group and the mesh.

        Raises:
            OptionError: Sizes or precision are not supported.
        """
        precision = str(self.precision_plugin.precision)
        if precision not in _PRECISIONS:
            raise OptionError(
                f"precision={precision!r} is not supported by {type(self).__name__}, which supports "
                f"{', '.join(_PRECISIONS)}. Set Trainer(precision='32-true') and choose FineTuner(dtype=...)."
            )
        self._choose_sizes(self._count_devices())
        shard = self._num_shards()
        super().setup_environment()
        if shard != self._data_parallel_size:
            from torch.distributed.device_mesh import init_device_mesh

            shape = (int(self._data_parallel_size) // shard, shard)
            self._sharding_mesh = init_device_mesh(self.root_device.type, shape, mesh_dim_names=("replicate", "shard"))

    def setup(self, trainer: Trainer) -> None:
        """Shard the model if configure_model did not, then install packed training and create the optimizer.

        Raises:
            OptionError: The strategy cannot shard the module; the message has the line to add to the module. Or a
                callback unfreezes layers, or the optimizer cannot step shards.
        """
        for callback in callbacks_of(trainer):
            if isinstance(callback, BaseFinetuning):
                raise OptionError(
                    f"{type(callback).__name__} looks up names of the optimizer's parameters during training. Under "
                    "strategy='fastft_fsdp' those are shards. Use strategy='fastft_ddp', or freeze layers for the "
                    "whole run without the callback."
                )
        self._shard_module()
        super().setup(trainer)
        _check_optimizers(self.optimizers)
        self._replicate()

    def teardown(self) -> None:
        """Tear down the parent strategies."""
        if self._replicated is not None:
            self._replicated.release()
            self._replicated = None
        super().teardown()

    def on_validation_end(self) -> None:
        """Shard what a validation left gathered, so that callbacks find the optimizer's tensors in the module."""
        from lightning_fastft.hf.sharding.state import reshard_trained

        super().on_validation_end()
        assert self.model is not None
        reshard_trained(self.model)

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Run forward, backward and step; afterwards no unit holds the weights from before it.

        Raises:
            DeviceMemoryError: The message has the changes, and the options for a restart.
        """
        from lightning_fastft.hf.sharding.state import reshard_trained

        output = super().optimizer_step(optimizer, closure, model, **kwargs)
        assert self.model is not None
        reshard_trained(self.model)
        return output

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Skip the reduction of gradients in all backwards of an accumulation window except the last one."""
        from lightning_fastft.hf.sharding.state import sharded_roots

        assert self.model is not None
        roots: list[Any] = [*sharded_roots(self.model)] if self.gradient_sync == "window" else []
        if self._replicated is not None:
            # Their gradients are whole in any case.
            roots.append(self._replicated)
        for root in roots:
            root.set_requires_gradient_sync(False)
        self._is_in_window = self.gradient_sync == "window"
        try:
            yield
        finally:
            self._is_in_window = False
            for root in roots:
                root.set_requires_gradient_sync(True)

    def statuses(self) -> list[Status]:
        """Return the statuses, with how the model is sharded."""
        own = super().statuses()
        return own if self._sharding is None else [self._sharding, *own]

    def _choose_sizes(self, world_size: int) -> None:
        data, tensor = self._data_parallel_size, self._tensor_parallel_size
        if tensor == "auto":
            tensor = 1 if data == "auto" else world_size // data
        if data == "auto":
            data = world_size // tensor
        if data * tensor != world_size:
            raise OptionError(
                f"data_parallel_size={self._data_parallel_size} and tensor_parallel_size={self._tensor_parallel_size} "
                f"do not fit {world_size} devices: their product must be the number of devices. Leave both at 'auto' "
                "for data parallelism over all devices."
            )
        self._data_parallel_size, self._tensor_parallel_size = data, tensor

    def _num_shards(self) -> int:
        """Return the number of devices over which one copy of the weights is sharded.

        Raises:
            OptionError: The sizes of the mesh do not fit each other, or are combined with tensor parallelism.
        """
        data = int(self._data_parallel_size)
        shard = {"auto": data, "node": self.num_processes}.get(str(self.shard), self.shard)
        assert isinstance(shard, int)
        check_mesh(data, shard=shard, context_parallel=self.context_parallel, expert_parallel=self.expert_parallel)
        if self._tensor_parallel_size != 1 and (shard != data or self.context_parallel > 1 or self.expert_parallel > 1):
            raise OptionError(
                "shard, context_parallel and expert_parallel are not supported with tensor parallelism. Leave them at "
                "their defaults, or set tensor_parallel_size=1."
            )
        return shard

    def _shard_module(self) -> None:
        """Shard a module that configure_model did not shard; refuse one whose ranks would not exchange gradients."""
        from lightning_fastft.hf.sharding.state import interleaved_names, is_sharded, unsharded_trained_names
        from lightning_fastft.hf.sharding.units import shard_model

        module = self.lightning_module
        assert module is not None
        name = type(module).__name__
        if not is_overridden("configure_model", module):
            raise OptionError(
                f"{name} builds its model before the devices are known. Under strategy='fastft_fsdp' build it in this "
                "hook: def configure_model(self): self.model = self.model or "
                "AutoModelForCausalLM.from_pretrained(...)"
            )
        self._reshard()
        if not is_sharded(module):
            if self._tensor_parallel_size != 1:
                raise OptionError(
                    f"tensor_parallel_size={self._tensor_parallel_size}, and {name} applies no tensor parallelism in "
                    "configure_model. Leave the sizes at 'auto' for data parallelism over all devices, or parallelise "
                    "the model there over self.device_mesh['tensor_parallel']."
                )
            self._sharding = shard_model(
                module,
                self.sharding_mesh,
                adapters=self.adapters,
                owns_experts=self.expert_parallel > 1,
            )
        if self._tensor_parallel_size != 1 and (interleaved := interleaved_names(module)):
            raise OptionError(
                f"The tensor parallelism of {name} splits {list_names(interleaved)} in interleaved parts, which torch "
                "cannot save and loads wrongly. Split experts with FastFTFSDPStrategy(expert_parallel=...) instead, or "
                "leave these weights out of the plan."
            )
        whole = unsharded_trained_names(module)
        if whole:
            raise OptionError(
                f"{len(whole)} trained tensors of {name} are outside of its sharded model, so their gradients would "
                f"differ between the ranks: {', '.join(whole[:3])}. Shard their module at the end of "
                f"configure_model: fully_shard(self.{whole[0].rpartition('.')[0]}, "
                "mesh=self.device_mesh['data_parallel']), and the model itself as well."
            )

    def _replicate(self) -> None:
        """Average the gradients of trained parameters that the sharded model leaves whole, on their device."""
        from lightning_fastft.hf.sharding.replicas import ReplicatedParameters
        from lightning_fastft.hf.sharding.state import replicated_parameters

        assert self.lightning_module is not None
        found = replicated_parameters(self.lightning_module)
        if found and self._replicated is None:
            self._replicated = ReplicatedParameters(found)


def _check_optimizers(optimizers: Iterable[Optimizer]) -> None:
    """Refuse optimizers of torch whose step fails on shards."""
    from torch.distributed.tensor import DTensor

    for optimizer in optimizers:
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if isinstance(optimizer, _NOT_SHARDED) and any(isinstance(parameter, DTensor) for parameter in held):
            raise OptionError(
                f"The step of {type(optimizer).__name__} needs whole weights, and strategy='fastft_fsdp' shards them. "
                "Use the default optimizer (FusedAdamW(optim_bits=8) for less memory), or strategy='fastft_ddp' if "
                "the model fits one device."
            )
