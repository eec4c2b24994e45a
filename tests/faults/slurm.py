"""A SLURM cluster of two nodes on this machine: munged, slurmctld and two slurmd, all in one folder."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

from tests.faults.ranks import free_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol")
START_S = 60.0
CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=3
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,bf_interval=1
ReturnToService=2
KillWait=5
SlurmdTimeout=10
JobRequeue=1
{nodes}
PartitionName=all Nodes=node[0-1] Default=YES MaxTime=INFINITE State=UP
"""


class SlurmCluster:
    """Two nodes, node0 and node1, that share this machine.

    Args:
        folder: Folder for the files of the daemons.
    """

    def __init__(self, folder):
        self.folder = Path(folder)
        self.environment = {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf")}
        self.daemons = {}
        host = socket.gethostname()
        nodes = "\n".join(
            f"NodeName=node{number} NodeHostname={host} NodeAddr=127.0.0.1 Port={free_port()} CPUs=2 State=UNKNOWN"
            for number in range(2)
        )
        (self.folder / "state").mkdir()
        text = CONFIG.format(host=host, port=free_port(), folder=self.folder, nodes=nodes)
        (self.folder / "slurm.conf").write_text(text)
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        self._start("munged", "--foreground", "--force", *self._munge_files())
        self._wait_for(lambda: (self.folder / "munge.sock").exists())
        self._start("slurmctld", "-D")
        for number in range(2):
            self.start_node(number)
        self._wait_for(lambda: self.run("sinfo", "-h", "-o", "%T").split() == ["idle"])

    def _munge_files(self):
        names = {"socket": "sock", "key-file": "key", "log-file": "log", "pid-file": "pid", "seed-file": "seed"}
        return [f"--{option}={self.folder}/munge.{name}" for option, name in names.items()]

    def _start(self, name, *words, key=None):
        self.daemons[key or name] = subprocess.Popen(
            [name, *words], env=self.environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    def _wait_for(self, is_so):
        deadline = time.monotonic() + START_S
        while not is_so():
            logs = [path.read_text()[-2000:] for path in self.folder.glob("*.log")]
            assert time.monotonic() < deadline, "\n".join(logs)
            time.sleep(0.1)

    def start_node(self, number):
        """Start the daemon of a node, for the first time or after it was lost."""
        (self.folder / f"spool-node{number}").mkdir(exist_ok=True)
        self._start("slurmd", "-D", "-N", f"node{number}", key=number)

    def lose_node(self, number):
        """Kill the daemon of a node and all its child processes."""
        self._kill_all(f"SLURM_CONF={self.environment['SLURM_CONF']}", f"SLURMD_NODENAME=node{number}")
        self.daemons[number].kill()
        self.daemons.pop(number).wait()

    @staticmethod
    def _kill_all(*wanted):
        """Kill the processes that have these variables in their environment."""
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if {word.encode() for word in wanted} <= set((entry / "environ").read_bytes().split(b"\0")):
                    os.kill(int(entry.name), signal.SIGKILL)

    def run(self, *words, **options):
        """Run a command of SLURM and return its output."""
        done = subprocess.run(words, env=self.environment, capture_output=True, text=True, check=False, **options)
        return done.stdout.strip()

    def submit(self, script, *words, environment, said):
        """Submit a script and return the number of the job."""
        command = ["sbatch", "--parsable", "--ntasks-per-node=1", "--output", said, script, *words]
        given = {**environment, "SLURM_CONF": self.environment["SLURM_CONF"], "MASTER_ADDR": "127.0.0.1"}
        done = subprocess.run(map(str, command), env=given, cwd=self.folder, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    def state(self, job):
        """Return the state of a job; one that is queued again starts at once, not after two minutes."""
        words = self.run("scontrol", "show", "job", job).split()
        state = next((word.partition("=")[2] for word in words if word.startswith("JobState=")), "")
        if state == "PENDING":
            self.run("scontrol", "update", f"JobId={job}", "StartTime=now")
        return state

    def wait_for_end(self, job, *, limit_s=300.0):
        """Wait until a job has ended for good, and return its state."""
        deadline = time.monotonic() + limit_s
        while (state := self.state(job)) not in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT"):
            if time.monotonic() > deadline:
                return state
            time.sleep(0.5)
        return state

    def stop(self):
        """End the jobs, the daemons, and all their child processes."""
        for daemon in reversed(list(self.daemons.values())):
            daemon.kill()
            daemon.wait()
        self._kill_all(f"SLURM_CONF={self.environment['SLURM_CONF']}")


@contextlib.contextmanager
def slurm_cluster(folder):
    """Yield a cluster."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing or os.geteuid() != 0:
        pytest.skip(f"needs root and the packages slurm-wlm and munge (missing: {', '.join(missing) or 'none'})")
    folder.mkdir()
    cluster = SlurmCluster(folder)
    try:
        yield cluster
    finally:
        cluster.stop()
