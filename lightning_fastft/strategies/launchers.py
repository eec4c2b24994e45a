"""Refuse runs whose size is not that of the job: processes would train alone, or wait for others."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy

from lightning_fastft.core.errors import OptionError

if TYPE_CHECKING:
    from lightning.fabric.plugins import ClusterEnvironment

# Variables with the number of processes of srun, Open MPI, MPICH or Intel MPI, and MVAPICH.
_SIZES = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")


def refuse_several_processes(strategy: Strategy, *, num_nodes: int = 1) -> None:
    """Refuse a strategy for one device in a run of several processes or nodes.

    Args:
        strategy: The strategy of the run.
        num_nodes: Nodes that the trainer was given.

    Raises:
        OptionError: A launcher started several processes, or there are several nodes, so that each process would
            train alone and write the same files.
    """
    if not isinstance(strategy, SingleDeviceStrategy):
        return
    num_processes, name = _count_processes()
    if num_processes > 1 or num_nodes > 1:
        told = (
            f"The launcher started {num_processes} processes ({name}={num_processes})"
            if num_processes > 1
            else f"There are {num_nodes} nodes"
        )
        raise OptionError(
            f"{told}, and each would train alone and write the same files. "
            "Use strategy fastft_ddp (a whole model on each device) or fastft_fsdp (one model over all devices): "
            '--trainer.strategy fastft_ddp, or Trainer(strategy="fastft_ddp").'
        )


def refuse_other_size(environment: ClusterEnvironment, *, num_devices: int, num_nodes: int) -> None:
    """Refuse a run of several devices whose size is not that of the job.

    Lightning compares them for torchrun and SLURM, and not under FSDP2. LightningEnvironment knows only processes that
    it starts, or whose ranks are in LOCAL_RANK and NODE_RANK.

    Args:
        environment: Source of the ranks.
        num_devices: Devices of a node that the trainer was given.
        num_nodes: Nodes that the trainer was given.

    Raises:
        OptionError: The sizes differ.
    """
    size, is_lightnings = num_devices * num_nodes, isinstance(environment, LightningEnvironment)
    num_processes, name = _count_processes() if is_lightnings else (environment.world_size(), "")
    is_external = environment.creates_processes_externally
    if num_processes == size if is_external else num_processes == 1:
        return
    # One process for each node starts the others, and sets their WORLD_SIZE.
    starts_others = num_processes == num_nodes and not (is_external and name == "WORLD_SIZE")
    if is_lightnings and (not name or starts_others):
        return
    source = f"{name}={num_processes}" if name else f"read by {type(environment).__name__}"
    given = f"The launcher started {num_processes} processes ({source})"
    if is_external:
        raise OptionError(
            f"{given}, and devices={num_devices} with num_nodes={num_nodes} is a run of {size}. Set devices to the "
            "number of processes on a node, and num_nodes to the number of nodes."
        )
    raise OptionError(
        f"{given}, and Lightning does not know their ranks: each would start a run of its own and write the same "
        "files. Start them with torchrun or srun, or install mpi4py for mpirun."
    )


def _count_processes() -> tuple[int, str]:
    """Return the number of processes that a launcher started for this run, and the name of its variable.

    It is 1 and "" without a launcher. WORLD_SIZE alone is also set by Lightning for processes that it starts.
    """
    given = os.environ
    if "WORLD_SIZE" in given and ("TORCHELASTIC_RUN_ID" in given or "RANK" in given):
        return int(given["WORLD_SIZE"]), "WORLD_SIZE"
    # The shell of srun --pty is one process, whatever the size of its step.
    sizes = [name for name in _SIZES if not (name == "SLURM_STEP_NUM_TASKS" and "SLURM_PTY_PORT" in given)]
    name = next((name for name in sizes if int(given.get(name, "1")) > 1), "")
    return int(given.get(name, "1")), name
