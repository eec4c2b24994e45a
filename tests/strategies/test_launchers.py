"""Runs whose size is not that of the job are refused when the Trainer is made."""

import pytest

from lightning_fastft.core.errors import OptionError
from lightning_fastft.strategies.registry import register_strategies
from lightning_fastft.strategies.single_device import FastFTStrategy
from tests.support.training_parts import quiet_trainer

NAMES = ("fastft_ddp", "fastft_fsdp")
BY_HAND = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}
TORCHRUN = {**BY_HAND, "TORCHELASTIC_RUN_ID": "job", "LOCAL_WORLD_SIZE": "2"}
SRUN = {
    "SLURM_JOB_ID": "7",
    "SLURM_NTASKS": "2",
    "SLURM_NTASKS_PER_NODE": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_NNODES": "1",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
}
# srun --pty bash, in a step of four tasks.
SHELL = {**SRUN, "SLURM_JOB_NAME": "bash", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PTY_PORT": "34889"}
MPIRUN = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}
# A process that Lightning started, on a node where mpirun started one.
CHILD = {**MPIRUN, "LOCAL_RANK": "1", "NODE_RANK": "0", "WORLD_SIZE": "4"}


@pytest.fixture
def set_launcher(monkeypatch):
    register_strategies()

    # An earlier test of this process may have left ranks.
    for name in ("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)

    def set_all(values):
        for name, value in values.items():
            monkeypatch.setenv(name, value)

    return set_all


@pytest.mark.parametrize("strategy", NAMES)
@pytest.mark.parametrize(
    ("launcher", "options", "message"),
    [
        (MPIRUN, {"devices": 1}, "OMPI_COMM_WORLD_SIZE=2.*a run of its own"),
        (MPIRUN, {"devices": 2}, "OMPI_COMM_WORLD_SIZE=2.*a run of its own"),
        ({"PMI_SIZE": "4"}, {"devices": 4}, "PMI_SIZE=4"),
        # Pods of a job in Kubernetes.
        ({"RANK": "1", "WORLD_SIZE": "2"}, {"devices": 1}, "WORLD_SIZE=2"),
        (BY_HAND, {"devices": 1}, "devices=1 with num_nodes=1 is a run of 1"),
        (BY_HAND, {"devices": 2, "num_nodes": 2}, "a run of 4"),
        (TORCHRUN, {"devices": 1}, "TorchElastic.*a run of 1"),
        ({**TORCHRUN, "WORLD_SIZE": "4"}, {"devices": 2}, "4 processes.*num_nodes=1 is a run of 2"),
        (SRUN, {"devices": 1}, "2 processes.*SLURM.*a run of 1"),
    ],
)
def test_size_that_is_not_that_of_the_job_is_refused(set_launcher, strategy, launcher, options, message):
    set_launcher(launcher)
    with pytest.raises(OptionError, match=message):
        quiet_trainer(strategy=strategy, **options)


@pytest.mark.parametrize("strategy", NAMES)
@pytest.mark.parametrize(
    ("launcher", "options"),
    [
        ({}, {"devices": 2}),
        ({}, {"devices": 2, "num_nodes": 2}),
        (BY_HAND, {"devices": 2}),
        (BY_HAND, {"devices": 1, "num_nodes": 2}),
        (TORCHRUN, {"devices": 2}),
        (SRUN, {"devices": 2}),
        # One process on each node, which starts the others.
        (MPIRUN, {"devices": 2, "num_nodes": 2}),
        (CHILD, {"devices": 2, "num_nodes": 2}),
        ({"LOCAL_RANK": "1", "WORLD_SIZE": "2"}, {"devices": 2}),
        (SHELL, {"devices": 2}),
        # As Lightning leaves it for a second Trainer of a pod.
        ({"RANK": "0", "LOCAL_RANK": "0"}, {"devices": 2}),
    ],
)
def test_size_of_the_job_is_accepted(set_launcher, strategy, launcher, options):
    set_launcher(launcher)
    trainer = quiet_trainer(strategy=strategy, **options)
    assert trainer.num_devices == options["devices"]


@pytest.mark.parametrize("launcher", [MPIRUN, {"RANK": "0", "WORLD_SIZE": "2"}, TORCHRUN, SRUN])
def test_one_device_is_refused_in_a_job_of_several_processes(set_launcher, launcher):
    set_launcher(launcher)
    with pytest.raises(OptionError, match=r"started 2 processes .*each would train alone"):
        FastFTStrategy().setup_environment()
