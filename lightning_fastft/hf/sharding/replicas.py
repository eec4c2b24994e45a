"""Trained parameters that every rank of a sharded model holds whole: their values, and their gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn


class ReplicatedParameters:
    """Keep parameters equal on all ranks: their values from rank 0 once, then the mean of their gradients.

    One fp32 all-reduce at the end of a backward that syncs covers all of them. Every rank contributes every parameter:
    a missing gradient counts as zeros, and is set to the mean.

    Cost:
        One broadcast at the start. Per synced backward one all-reduce of 4 bytes per value, and one read and write of
        the gradients, which become views of its result. No host sync.

    Source:
        Data parallelism as in torch.nn.parallel.DistributedDataParallel, with one bucket.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._syncs = True
        # The backward that will reduce at its end; a backward that raises never does.
        self._queued_for: int | None = None
        self._handles = [each.register_post_accumulate_grad_hook(self._queue) for each in self._parameters]
        with torch.no_grad():
            flat = torch.cat([each.detach().flatten().float() for each in self._parameters])
            torch.distributed.broadcast(flat, src=0)
            for parameter, values in zip(self._parameters, self._split(flat)):
                parameter.copy_(values)

    def set_requires_gradient_sync(self, syncs: bool) -> None:
        """Choose whether the next backwards reduce, as ``FSDPModule.set_requires_gradient_sync``."""
        self._syncs = syncs

    def release(self) -> None:
        """Remove the hooks; a second call does nothing."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _queue(self, parameter: torch.Tensor) -> None:
        """Reduce once at the end of this backward, as FSDP2 does for its root."""
        task = torch._C._current_graph_task_id()
        if self._syncs and task != self._queued_for:
            self._queued_for = task
            torch.autograd.Variable._execution_engine.queue_callback(self._reduce)

    @torch.no_grad()
    def _reduce(self) -> None:
        flat = torch.cat(
            [
                each.new_zeros(each.numel(), dtype=torch.float32) if each.grad is None else each.grad.flatten().float()
                for each in self._parameters
            ]
        )
        torch.distributed.all_reduce(flat)
        flat.div_(torch.distributed.get_world_size())
        for parameter, values in zip(self._parameters, self._split(flat)):
            parameter.grad = values.to(parameter.dtype)

    def _split(self, flat: torch.Tensor) -> list[torch.Tensor]:
        pieces = flat.split([each.numel() for each in self._parameters])
        return [piece.view(each.shape) for piece, each in zip(pieces, self._parameters)]
