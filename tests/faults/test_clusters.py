"""Jobs over two nodes by the scripts of clusters/: they train, continue after a loss by themselves, and name the lost
node.

The nodes of torchrun and of plain processes are network namespaces, those of SLURM are two slurmd.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from itertools import pairwise

import pytest
import torch

from lightning_fastft.demo.files import write_demo_files
from lightning_fastft.demo.generator import generate_rows
from tests.faults.nodes import SCRIPTS, START_S, ClusterJob, two_nodes
from tests.faults.slurm import slurm_cluster

pytestmark = pytest.mark.fault
# Detect a lost agent in 3 s, not in 15, and wait 5 s for more nodes, not 30.
RDZV = "join_timeout=600,keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=5"
LOST = "Watchdog: node 1 (node1) is lost: rank 1 gave no sign of life for"


def reports(job):
    return "".join(path.read_text() for path in (job.folder / "runs").glob("watchdog-*.txt"))


@contextlib.contextmanager
def started_nodes(job, script, **variables):
    """Yield two nodes after a script starts on each."""
    with two_nodes(job) as nodes:
        for node in nodes:
            node.start(script, **variables)
        yield nodes


def check_steps(job, num_steps):
    """Every step was trained, and each start begins with the last step of the checkpoint before it."""
    assert sorted(job.losses()) == list(range(1, num_steps + 1))
    for before, after in pairwise(job.notes()):
        assert "num_nodes" in after or after["step"] == before["step"] + 1


@pytest.mark.parametrize("script", ["torchrun.sh", "plain.sh"])
def test_two_nodes_train_one_model(tmp_path, script):
    job = ClusterJob(tmp_path, num_steps=6, pause_s=0.0, timeout_s=60.0)
    with started_nodes(job, script) as nodes:
        assert [node.end() for node in nodes] == [0, 0], job.said()
    assert job.starts() == [(0, 2)]
    check_steps(job, 6)


def test_a_job_goes_on_without_a_lost_node_and_takes_it_back(tmp_path):
    job = ClusterJob(tmp_path, num_steps=60)
    with started_nodes(job, "elastic.sh", RDZV=RDZV) as nodes:
        job.wait_for_step(6)
        nodes[1].signal_all(signal.SIGKILL)
        nodes[1].process.wait()
        job.wait_for(lambda notes: len(job.starts()) == 2)
        job.wait_for_step(job.starts()[1][0] + 4)
        nodes[1].start("elastic.sh", RDZV=RDZV)
        assert [node.end() for node in nodes] == [0, 0], job.said()
    print(f"lost and rejoined: starts (step, nodes) {job.starts()}")
    assert LOST in reports(job), job.said()
    assert [num_nodes for _, num_nodes in job.starts()] == [2, 1, 2]
    # torchrun stops the ranks for the node that comes back, and they save the step that they are in.
    stopped = [int(path.stem.partition("=")[2]) for path in (tmp_path / "runs").glob("stopped-step=*.ckpt")]
    assert job.starts()[2][0] in stopped
    check_steps(job, 60)


def test_a_node_that_is_cut_off_is_left_behind_and_ends_itself(tmp_path):
    job = ClusterJob(tmp_path, num_steps=30)
    with started_nodes(job, "elastic.sh", RDZV=RDZV) as nodes:
        job.wait_for_step(6)
        nodes[1].cut_off()
        assert nodes[0].end() == 0, job.said()
        deadline = time.monotonic() + START_S
        while "is killed" not in (said := (tmp_path / "said-1").read_text()):
            assert time.monotonic() < deadline, said
            time.sleep(0.2)
    assert LOST in reports(job), job.said()
    assert "rank 1 lost the folder of the run" in said or "rank 1 made no progress" in said
    assert [num_nodes for _, num_nodes in job.starts()] == [2, 1]
    check_steps(job, 30)


def test_slurm_requeues_a_saved_job_which_goes_on_bit_for_bit(tmp_path):
    weights = []
    for is_stopped in (False, True):
        folder = tmp_path / str(is_stopped)
        folder.mkdir()
        job = ClusterJob(folder, num_steps=20, pause_s=0.2 if is_stopped else 0.0, timeout_s=60.0)
        with slurm_cluster(folder / "slurm") as slurm:
            said = folder / "said-slurm"
            number = slurm.submit(SCRIPTS / "slurm.sh", *job.words, environment=job.environment, said=said)
            if is_stopped:
                job.wait_for_step(6)
                # The same as --signal=USR1@120; a second signal has no effect.
                for _ in range(2):
                    slurm.run("scancel", "--signal=USR1", number)
            assert slurm.wait_for_end(number) == "COMPLETED", job.said()
        weights.append(job.weights())
    check_steps(job, 20)
    (stopped,) = (folder / "runs").glob("stopped-step=*.ckpt")
    assert job.starts() == [(0, 2), (int(stopped.stem.partition("=")[2]), 2)]
    assert f"SLURM requeues job {number}" in said.read_text()
    assert "ranks are no longer watched" not in said.read_text()
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


def test_slurm_requeues_a_job_that_lost_a_node(tmp_path):
    job = ClusterJob(tmp_path, num_steps=20)
    with slurm_cluster(tmp_path / "slurm") as slurm:
        said = tmp_path / "said-slurm"
        number = slurm.submit(SCRIPTS / "slurm.sh", *job.words, environment=job.environment, said=said)
        job.wait_for_step(6)
        slurm.lose_node(1)
        time.sleep(15.0)
        slurm.start_node(1)
        assert slurm.wait_for_end(number) == "COMPLETED", job.said()
    # Both nodes have the host name of this machine.
    assert "is lost: rank 1 gave no sign of life for" in reports(job), job.said()
    assert len(job.starts()) == 2
    assert job.starts()[1][0] >= 5
    check_steps(job, 20)


def test_ray_starts_a_job_again_after_a_dead_worker(tmp_path):
    pytest.importorskip("ray.train", reason="needs pip install 'ray[train]'")
    files = write_demo_files(generate_rows(num_train=300, num_validation=4), tmp_path / "demo", vocab_size=320)
    out = tmp_path / "out"
    words = ["--model", files.model, "--init", "random", "--dtype", "float32", "--data", files.train, "--out", out]
    words += ["--workers", "2", "--steps", "60", "--save", "1", "--tokens", "512"]
    environment = {**ClusterJob(tmp_path).environment, "RAY_DEDUP_LOGS": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    with open(tmp_path / "said", "w+", encoding="utf-8") as said:
        command = [sys.executable, str(SCRIPTS / "ray_train.py"), *map(str, words)]
        driver = subprocess.Popen(command, env=environment, cwd=tmp_path, stdout=said, stderr=said)
        try:
            deadline = time.monotonic() + START_S
            while not (out / "last.ckpt").exists():
                assert driver.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.02)
            (state,) = out.glob(".watchdog-*/rank-1")
            os.kill(json.loads(state.read_text())["pid"], signal.SIGKILL)
            assert driver.wait(2 * START_S) == 0
        finally:
            with contextlib.suppress(ProcessLookupError):
                driver.terminate()
            driver.wait()
        said.seek(0)
        text = said.read()
    assert "Watchdog: rank 1 is dead: killed" in text
    assert "Restored all states from the checkpoint at" in text
    assert torch.load(out / "last.ckpt", weights_only=True)["global_step"] == 60
