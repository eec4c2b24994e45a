"""SLURM jobs that requeue themselves: their signal, the request, and whether a run belongs to a requeued job."""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING

from lightning.fabric.plugins.environments import SLURMEnvironment

from lightning_fastft.checkpoint.lightning_internals import cluster_environment

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

# slurmctld may be busy; the ranks wait meanwhile.
_REQUEST_S = 30.0


def requeue_signal(trainer: Trainer) -> int:
    """Return the signal after which a job is saved and requeued; 0 outside of SLURM and with auto_requeue=False."""
    environment = cluster_environment(trainer)
    is_requeued = isinstance(environment, SLURMEnvironment) and environment.auto_requeue
    return int(environment.requeue_signal or 0) if is_requeued else 0


def is_requeued(trainer: Trainer) -> bool:
    """Return whether SLURM has requeued the job of this run, so that it continues an earlier one."""
    return bool(requeue_signal(trainer)) and int(os.environ.get("SLURM_RESTART_COUNT", "0")) > 0


def requeue_job() -> str:
    """Ask SLURM to end this job and to queue it again; return the outcome as a sentence."""
    job = os.environ["SLURM_JOB_ID"]
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    if array is not None:
        job = f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    command = ["scontrol", "requeue", job]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_REQUEST_S, check=False)  # noqa: S603
        reason = done.stderr.strip() if done.returncode else ""
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = str(error)
    if reason:
        return (
            f"SLURM did not requeue job {job}: {reason}. The checkpoint is written: submit the job again, with "
            "#SBATCH --requeue, and it continues with ckpt_path=last."
        )
    return f"SLURM requeues job {job}, which continues from this checkpoint."
