"""Refuse a strategy for one device in a job of several processes."""

from __future__ import annotations

import os

from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy

from lightning_fastft.core.errors import OptionError


def refuse_several_processes(strategy: Strategy) -> None:
    """Refuse a strategy for one device if torchrun or srun started several processes for this run.

    Raises:
        OptionError: They did, so that each process would train alone and write the same files.
    """
    num_processes = _count_processes()
    if num_processes > 1 and isinstance(strategy, SingleDeviceStrategy):
        raise OptionError(
            f"The launcher started {num_processes} processes, and each would train alone and write the same files. "
            "Use strategy fastft_ddp (a whole model on each device) or fastft_fsdp (one model over all devices): "
            '--trainer.strategy fastft_ddp, or Trainer(strategy="fastft_ddp").'
        )


def _count_processes() -> int:
    """Return the number of processes that torchrun or srun started for this run."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return int(os.environ.get("WORLD_SIZE", "1"))
    return int(os.environ.get("SLURM_STEP_NUM_TASKS", "1"))
