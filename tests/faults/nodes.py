"""Two nodes on one machine: network namespaces with a link between them, in which the scripts of clusters/ start a job.

Processes of a node run in its namespace, so a node can be killed, stopped and cut off as a whole.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch.callbacks import Callback

from lightning_fastft.demo.files import write_demo_files
from lightning_fastft.demo.generator import generate_rows
from tests.faults.ranks import free_port

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "clusters"
ADDRESSES = ("10.77.0.1", "10.77.0.2")
# Time for two processes to load torch at once on two busy cores.
START_S = 600.0


# What the lines of docs/clusters.md give after the config, and this module's package.
CLUSTER_OPTIONS = ["--trainer.strategy", "fastft_ddp", "--allow-import", "tests"]


class Note(Callback):
    """Writes a line per start and per step of rank 0 to a file, and makes steps as long as a test needs.

    Args:
        path: The file.
        pause_s: Extra seconds of each micro-batch.
        slow_rank: A rank that takes ten times as long.
    """

    def __init__(self, path: str, pause_s: float = 0.0, slow_rank: int = -1) -> None:
        self.path, self.pause_s, self.slow_rank = path, pause_s, slow_rank

    def _write(self, trainer, **values):
        if trainer.is_global_zero:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(json.dumps({"step": trainer.global_step, **values}) + "\n")

    def on_train_start(self, trainer, pl_module):
        self._write(trainer, num_ranks=trainer.world_size, num_nodes=trainer.num_nodes)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        time.sleep(self.pause_s * (10 if trainer.global_rank == self.slow_rank else 1))

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self._write(trainer, loss=float(outputs["loss"]))


class ClusterJob:
    """A job that trains a tiny FineTuner in a folder, saves every step and records its progress."""

    def __init__(self, folder, *, num_steps=40, pause_s=0.2, timeout_s=5.0, slow_rank=-1):
        self.folder, self.port = Path(folder), free_port()
        files = write_demo_files(generate_rows(num_train=300, num_validation=4), self.folder / "demo", vocab_size=320)
        note = {"path": str(self.folder / "notes"), "pause_s": pause_s, "slow_rank": slow_rank}
        saves = {"dirpath": str(self.folder / "runs"), "every_n_train_steps": 1, "save_last": True}
        callbacks = {
            "tests.faults.nodes.Note": note,
            "lightning_fastft.Watchdog": {"timeout_s": timeout_s},
            "lightning.pytorch.callbacks.ModelCheckpoint": saves,
        }
        data = {"paths": str(files.train), "max_tokens": 512, "cache_dir": None, "num_workers": 0, "num_proc": 1}
        model = {"model": str(files.model), "init": "random", "dtype": "float32", "lora": {"r": 4, "lora_dropout": 0.1}}
        config = {
            "data": {"class_path": "lightning_fastft.PackedDataModule", "init_args": data},
            "model": {"class_path": "lightning_fastft.FineTuner", "init_args": model},
            "trainer": {
                "callbacks": [{"class_path": name, "init_args": values} for name, values in callbacks.items()],
                "accelerator": "cpu",
                "devices": 1,
                "max_steps": num_steps,
                "max_epochs": -1,
                "logger": False,
                "default_root_dir": str(self.folder / "runs"),
                "enable_progress_bar": False,
            },
        }
        (self.folder / "config.yaml").write_text(yaml.safe_dump(config))

    @property
    def words(self):
        """Arguments that a user appends to a script of clusters/."""
        return ["--config", str(self.folder / "config.yaml"), *CLUSTER_OPTIONS]

    @property
    def environment(self):
        """Variables that a user sets for a script of clusters/, and those for a busy machine without a GPU."""
        return {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "GPUS": "1",
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PORT": str(self.port),
        }

    def notes(self):
        """Return the notes of rank 0 so far."""
        path = self.folder / "notes"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def wait_for(self, is_there, *, limit_s=START_S):
        """Wait until the notes meet a condition, and return them."""
        deadline = time.monotonic() + limit_s
        while not is_there(self.notes()):
            assert time.monotonic() < deadline, f"{self.notes()[-3:]}\n{self.said()}"
            time.sleep(0.05)
        return self.notes()

    def wait_for_step(self, step):
        """Wait until the job has trained this step."""
        return self.wait_for(lambda notes: any(note["step"] >= step and "loss" in note for note in notes))

    def losses(self):
        """Return the last noted loss of each step."""
        return {note["step"]: note["loss"] for note in self.notes() if "loss" in note}

    def starts(self):
        """Return the step and the number of nodes of every start."""
        return [(note["step"], note["num_nodes"]) for note in self.notes() if "num_nodes" in note]

    def weights(self):
        """Return the tensors of the newest checkpoint."""
        return torch.load(self.folder / "runs" / "last.ckpt", weights_only=True)["state_dict"]

    def said(self):
        """Return the ends of what the processes have written."""
        return "\n".join(f"{path.name}:\n{path.read_text()[-6000:]}" for path in sorted(self.folder.glob("said-*")))


class Node:
    """A network namespace with its own host name, in which processes run.

    Args:
        number: 0 or 1.
        job: The job that its processes belong to.
    """

    def __init__(self, number, job):
        self.number, self.job, self.name = number, job, f"fastft-{os.getpid()}-{number}"
        self.link = f"ff{os.getpid() % 10**7}-{number}"
        self.process = None
        _run("ip", "netns", "add", self.name)

    def start(self, script, *words, **environment):
        """Start a script of clusters/ on this node."""
        given = {**self.job.environment, "HEAD": "node0", "NODE_RANK": str(self.number), **environment}
        names = self.job.folder / "hosts"
        names.write_text("127.0.0.1 localhost\n10.77.0.1 node0\n10.77.0.2 node1\n")
        # ip netns exec gives each command its own mounts.
        inside = f'hostname node{self.number} && mount --bind {names} /etc/hosts && exec sh "$@"'
        command = [
            "ip",
            "netns",
            "exec",
            self.name,
            "unshare",
            "--uts",
            "sh",
            "-c",
            inside,
            "sh",
            str(SCRIPTS / script),
        ]
        with open(self.job.folder / f"said-{self.number}", "a", encoding="utf-8") as said:
            self.process = subprocess.Popen(
                [*command, *self.job.words, *words], cwd=self.job.folder, env=given, stdout=said, stderr=said
            )

    def pids(self):
        """Return all processes of the node."""
        return [int(pid) for pid in _run("ip", "netns", "pids", self.name).split()]

    def signal_all(self, number):
        """Send a signal to all processes of the node."""
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def cut_off(self):
        """Take the link down, and the shared folder away."""
        _run("ip", "netns", "exec", self.name, "ip", "link", "set", self.link, "down")
        assert self.process is not None
        shared = str(self.job.folder)
        _run("nsenter", "--target", str(self.process.pid), "--mount", "mount", "-t", "tmpfs", "none", shared)

    def end(self, *, limit_s=START_S):
        """Wait for the launcher to end, and return its exit code."""
        assert self.process is not None
        try:
            return self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            pytest.fail(self.job.said())

    def remove(self):
        """Kill the remaining processes, and remove the namespace."""
        self.signal_all(signal.SIGKILL)
        if self.process is not None:
            self.process.wait()
        _run("ip", "netns", "del", self.name)


@contextlib.contextmanager
def two_nodes(job):
    """Yield two nodes with a link between them."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    nodes = [Node(number, job) for number in range(2)]
    try:
        _run("ip", "link", "add", nodes[0].link, "type", "veth", "peer", "name", nodes[1].link)
        for node, address in zip(nodes, ADDRESSES):
            _run("ip", "link", "set", node.link, "netns", node.name)
            for words in (["addr", "add", f"{address}/24", "dev", node.link], ["link", "set", node.link, "up"]):
                _run("ip", "-n", node.name, *words)
            _run("ip", "-n", node.name, "link", "set", "lo", "up")
        yield nodes
    finally:
        for node in nodes:
            node.remove()


def _run(*command):
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
