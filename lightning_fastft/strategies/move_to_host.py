"""Move the model of a run that has ended to the host only if the host has room for it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn

from lightning_fastft.activations.budgets import available_host_bytes
from lightning_fastft.core.shards import local_values

# The rest stays free for the process itself and for others.
_USABLE_SHARE = 0.9


@contextlib.contextmanager
def moving_within_memory(module: nn.Module | None, *, num_local_ranks: int) -> Iterator[None]:
    """Let ``module.cpu()`` leave the module on its device, with a warning, if the host has no room for it.

    A step leaves its gradients behind, which would move too; they are dropped if there is no room for them.

    Args:
        module: The LightningModule of a run that has ended; None for none.
        num_local_ranks: Ranks of this host, which all move their modules at the same time.

    Cost:
        Reads /proc/meminfo once; no host sync.
    """
    if module is None:
        yield
        return
    move, own = module.cpu, vars(module).get("cpu")

    def move_if_it_fits() -> nn.Module:
        room = int(_USABLE_SHARE * available_host_bytes()) // num_local_ranks
        weight_bytes = _device_bytes([*module.parameters(), *module.buffers()])
        gradient_bytes = _device_bytes(weight.grad for weight in module.parameters() if weight.grad is not None)
        if weight_bytes + gradient_bytes > room:
            module.zero_grad(set_to_none=True)
        if weight_bytes <= room:
            return move()
        rank_zero_warn(
            f"The model stays on its device: it has {weight_bytes / 2**30:.1f} GiB, and the host has room for "
            f"{room / 2**30:.1f} GiB."
        )
        return module

    vars(module)["cpu"] = move_if_it_fits
    try:
        yield
    finally:
        del vars(module)["cpu"]
        if own is not None:
            vars(module)["cpu"] = own


def _device_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of the tensors that are not in host memory; of a sharded tensor those of its shard."""
    return sum(
        # NF4 numel() is the logical size; use held_bytes for memory.
        getattr(shard, "held_bytes", shard.numel() * shard.element_size())
        for shard in map(local_values, tensors)
        if shard.device.type != "cpu"
    )
