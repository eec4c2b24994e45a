"""Expert parallelism: the ranks that shard one copy of the weights each own a share of the experts of each layer.

Each rank has its own packs. The experts exchange tokens inside of each layer (``moe/expert_axis.py``); all other
weights are sharded and gathered as without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from lightning_fastft.checkpoint.ranks import RankVote
from lightning_fastft.core.checks import check_int
from lightning_fastft.core.errors import OptionError
from lightning_fastft.core.shards import local_values
from lightning_fastft.strategies.context_parallel import MOST_DEVICES, ContextParallelMixin, refuse_cuda_graphs
from lightning_fastft.strategies.packed_steps import find_packed_batches
from lightning_fastft.strategies.patching import callbacks_of, patcher_of

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from torch.distributed.device_mesh import DeviceMesh

    from lightning_fastft.core.patcher import ModelPatcher
    from lightning_fastft.moe.expert_axis import ExpertAxis

# Status name of the callback whose experts function exchanges tokens.
_ROUTER_STATUS = "expert router"


class ExpertParallelMixin(ContextParallelMixin):
    """Give the experts of a sharded model their axis; for strategies that shard over ``sharding_mesh``.

    Owned experts are shards that are never gathered, in the same mesh and form in which FSDP2 would shard them. So
    checkpoints, clipping and optimizers do not differ. This class only reduces gradients over several copies.

    Args:
        expert_parallel: Devices that own the experts of each layer in equal shares.
        **kwargs: Arguments of the parent strategies.

    Raises:
        OptionError: expert_parallel is not a positive number.

    Cost:
        Each micro-batch waits on the host until all ranks agree on their longest pack.
    """

    @property
    def sharding_mesh(self) -> DeviceMesh:
        """The mesh over which a model is sharded; its last axis is that of the experts."""
        raise NotImplementedError

    def __init__(self, *, expert_parallel: int = 1, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.expert_parallel = check_int("expert_parallel", expert_parallel, low=1, high=MOST_DEVICES)
        self._axis: ExpertAxis | None = None
        self._vote = RankVote()
        self._is_in_window = False

    def setup(self, trainer: Trainer) -> None:
        """Give every experts module its axis, and install packed training.

        Raises:
            OptionError: A callback is missing, or does not fit.
        """
        if self.expert_parallel > 1:
            check_callbacks(trainer, size=self.expert_parallel)
            self._share_experts(patcher_of(trainer))
        super().setup(trainer)

    def _share_experts(self, patcher: ModelPatcher) -> None:
        from lightning_fastft.hf.families import is_on_interface
        from lightning_fastft.moe.expert_axis import AXIS_ATTRIBUTE, ExpertAxis

        assert self.lightning_module is not None
        self._axis = ExpertAxis(self._axis_group())
        self._vote.open()
        for module in self.lightning_module.modules():
            if is_on_interface(module):
                patcher.set_attribute(module, AXIS_ATTRIBUTE, self._axis)

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Copy a batch to the device; the ranks agree on the tokens of their longest pack."""
        batch = super().batch_to_device(batch, device, dataloader_idx)
        if self._axis is not None:
            longest = max((each["input_ids"].numel() for each in find_packed_batches(batch)), default=0)
            self._axis.num_rows = -self._vote.fewest(-longest)
        return batch

    def agree(self, value: Any) -> Any:
        """Return the value that the ranks of the expert axis follow: recomputed layers exchange tokens."""
        if self.expert_parallel == 1:
            return super().agree(value)
        found = [value]
        dist.broadcast_object_list(found, group=self._axis_group(), group_src=0)
        return found[0]

    def post_backward(self, closure_loss: torch.Tensor) -> None:
        """Average the gradients of owned experts over the copies of the model, once per reduction of the others."""
        super().post_backward(closure_loss)
        if self._axis is None or self._is_in_window or self.sharding_mesh.ndim == 1:
            return
        from lightning_fastft.hf.families import is_on_interface

        assert self.lightning_module is not None
        group = self.sharding_mesh.get_group(0)
        for module in self.lightning_module.modules():
            for parameter in module.parameters(recurse=False) if is_on_interface(module) else ():
                if parameter.grad is not None:
                    grad = local_values(parameter.grad)
                    dist.all_reduce(grad, group=group)
                    grad.div_(self.sharding_mesh.size(0))

    def teardown(self) -> None:
        """Tear down the parent strategies; the model has no axis afterwards."""
        self._vote.close()
        super().teardown()
        self._axis = None

    def on_exception(self, exception: BaseException) -> None:
        """Stop waiting for other ranks after an error."""
        self._vote.drop()
        super().on_exception(exception)

    def _axis_group(self) -> Any:
        return self.sharding_mesh.get_group(self.sharding_mesh.ndim - 1)


def check_callbacks(trainer: Trainer, *, size: int) -> None:
    """Refuse runs without our experts function, and layers that run from CUDA graphs.

    Raises:
        OptionError: The message has the line to change.
    """
    if not any(getattr(callback, "status_name", "") == _ROUTER_STATUS for callback in callbacks_of(trainer)):
        raise OptionError(
            f"expert_parallel={size} needs BincountRouter, whose experts exchange tokens. Add it to the callbacks: "
            "Trainer(callbacks=[BincountRouter()])."
        )
    refuse_cuda_graphs(trainer, f"expert_parallel={size} exchanges tokens")
