"""Refuse a strategy for one device in a job of several processes."""

from __future__ import annotations

import os

from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy

from lightning_fastft.core.errors import OptionError


def refuse_several_processes(strategy: Strategy, *, num_nodes: int = 1) -> None:
    """Refuse a strategy for one device in a run of several processes or nodes.

    Args:
        strategy: The strategy of the run.
        num_nodes: Nodes that the trainer was given.

    Raises:
        OptionError: torchrun or srun started several processes, or there are several nodes, so that each process would
            train alone and write the same files.
    """
    if not isinstance(strategy, SingleDeviceStrategy):
        return
    num_processes = _count_processes()
    if num_processes > 1 or num_nodes > 1:
        told = (
            f"The launcher started {num_processes} processes" if num_processes > 1 else f"There are {num_nodes} nodes"
        )
        raise OptionError(
            f"{told}, and each would train alone and write the same files. "
            "Use strategy fastft_ddp (a whole model on each device) or fastft_fsdp (one model over all devices): "
            '--trainer.strategy fastft_ddp, or Trainer(strategy="fastft_ddp").'
        )


def _count_processes() -> int:
    """Return the number of processes that torchrun or srun started for this run."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return int(os.environ.get("WORLD_SIZE", "1"))
    return int(os.environ.get("SLURM_STEP_NUM_TASKS", "1"))
