"""Watchdog: end a run in which a rank is dead, stopped or hung, and name the rank and the step."""

from __future__ import annotations

import faulthandler
import json
import mmap
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections import deque
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_fastft.checkpoint.remote import is_remote
from lightning_fastft.checkpoint.resume import checkpoint_folder
from lightning_fastft.core.checks import check_float
from lightning_fastft.core.given_once import GivenOnce
from lightning_fastft.core.marks import has_passed, mark_time, ms_between
from lightning_fastft.core.status import Status
from lightning_fastft.monitor import rank_watch
from lightning_fastft.monitor.rank_watch.beats import RECORD_BYTES, Beat, Job, Phase, write_beat
from lightning_fastft.strategies.even_batches import check_even_batches
from lightning_fastft.strategies.mixin import FastFTStrategyMixin
from lightning_fastft.strategies.patching import patcher_of

if TYPE_CHECKING:
    import torch
    from lightning.pytorch import LightningModule, Trainer
    from torch.optim import Optimizer

STATUS_NAME = "watchdog"
# Kernels are built and plans are measured in the first three optimizer steps (OffloadCheckpointing).
FIRST_STEPS = 3
_OF_THIS_PROCESS = ("_process", "_memory", "_stacks", "_own_times")
# The time of a rank is the median of this many micro-batches.
NUM_TIMES = 20
# One day.
_MOST_SECONDS = 86_400.0


class Watchdog(GivenOnce, Callback):
    """End a run in which a rank is dead, stopped (SIGSTOP) or hung, and name the rank and the step.

    Each rank has a small watchdog process, which continues if the rank does not. The run ends at most 10 s after a rank
    died, or after it was stopped or made no progress in its training batches for timeout_s. A report with the position
    and the Python stacks of the ranks is written to stderr and to ``watchdog-step=N.txt`` in the folder of the first
    ModelCheckpoint (else ``default_root_dir``, or the current folder if that is remote). Every rank is killed with all
    its child processes, so that its exit code is not 0. A rank that fails with its own error is given time to end.

    Time is measured between hooks of training batches. It does not count at the start, nor from the beginning of a
    validation, a save or an epoch until the next batch; a hang there is not found, but a dead or stopped rank is. A
    rank that waits in a batch while another one saves or validates has first_steps_factor times as long. A run that is
    suspended with SIGSTOP for timeout_s is ended too. On a GPU the report names the position of the host, which runs
    ahead of the device. POSIX only; stopped ranks and child processes are found only with /proc.

    Ranks on several nodes name each other if they share the folder. A node whose watchdogs are all silent for 30 s (for
    timeout_s, if that is less) is lost: killed, stopped or cut off, also in a save or a validation. A node that lost
    the folder for as long ends its ranks. A node is named as slow, once, if its micro-batches take 1.3 times as long as
    those of the other nodes: loading and forward, which under FSDP2 waits for the other ranks, so that only slow
    loading shows there.

    Args:
        timeout_s: Seconds without progress after which the run is ended, 1 to 86,400; must exceed the longest
            micro-batch.
        first_steps_factor: How many times longer the first three optimizer steps may take, 1 to 1,000, because kernels
            are compiled in them.

    Raises:
        OptionError: A value is not allowed.
        DataError: From the training loop, before the first step: the ranks have different numbers of training batches.

    Cost:
        About 20 microseconds of the host per micro-batch, with one system call, no collective and no host sync. One
        process of about 10 MiB per rank, which reads the position of its rank four times a second, and writes a
        small file once a second. On several nodes two CUDA events per micro-batch. Three collectives at the start of
        the run, and about 50 ms to start the process.

    Source:
        own

    Example:
        >>> Watchdog(timeout_s=120.0).status()[0].state
        'inactive'
    """

    def __init__(self, *, timeout_s: float = 300.0, first_steps_factor: float = 10.0) -> None:
        self.timeout_s = check_float("timeout_s", timeout_s, low=1.0, high=_MOST_SECONDS)
        self.first_steps_factor = check_float("first_steps_factor", first_steps_factor, low=1.0, high=1000.0)
        self._statuses = [Status(STATUS_NAME, "inactive", "no training yet")]
        self._process: subprocess.Popen[bytes] | None = None
        self._memory: mmap.mmap | None = None
        self._stacks: IO[bytes] | None = None
        self._num_beats = self._num_batches = self._first_step = self._step = 0
        self._is_alone = True
        self._own_times: _OwnTimes | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Drop the process, which belongs to the original, from a copied or pickled callback."""
        return vars(self) | dict.fromkeys(_OF_THIS_PROCESS)

    def status(self) -> list[Status]:
        """Return whether ranks are watched and, under a strategy of Lightning, whether their batch counts agree."""
        return self._statuses

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse ranks with different numbers of batches, and start to watch this rank.

        Raises:
            DataError: The ranks have different numbers of training batches.
        """
        self._stop()
        if os.name != "posix":
            self._statuses = [
                Status(
                    STATUS_NAME,
                    "refused",
                    "processes can be watched on POSIX systems only",
                    "remove Watchdog",
                )
            ]
            return
        folder = next(
            (
                Path(found).absolute()
                for found in (checkpoint_folder(trainer), trainer.default_root_dir)
                if not is_remote(found)
            ),
            Path.cwd(),
        )
        self._first_step, self._num_batches, self._is_alone = trainer.global_step, 0, trainer.world_size == 1
        if self._is_alone:
            # Before any callback's on_exception: an error there would leave a watch that ends the process later.
            patcher_of(trainer).add_undo(self._stop)
        self._start(trainer, folder, run=trainer.strategy.broadcast(uuid.uuid4().hex))
        self._statuses = [
            Status(
                STATUS_NAME,
                "active",
                f"a rank without progress for {self.timeout_s:g} s ends the run; reports in {folder}",
            )
        ]
        # Strategies of lightning_fastft check this themselves.
        if trainer.world_size > 1 and not isinstance(trainer.strategy, FastFTStrategyMixin):
            self._statuses.append(check_even_batches(trainer))

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop the clock until the next training batch: loaders are built, or a validation runs."""
        self._beat(Phase.PAUSED)

    on_train_epoch_end = on_validation_start = on_train_epoch_start

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Start the clock of a micro-batch."""
        self._num_batches += 1
        self._step = trainer.global_step + 1
        self._beat(Phase.FORWARD)
        if self._own_times is not None:
            self._own_times.load()
            self._own_times.begin(trainer.strategy.root_device)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor) -> None:
        """Record the end of the forward."""
        self._beat(Phase.BACKWARD)
        if self._own_times is not None:
            self._own_times.end(trainer.strategy.root_device)

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record the end of the backward."""
        self._beat(Phase.BACKWARD_DONE)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Record the beginning of the optimizer step."""
        self._beat(Phase.OPTIMIZER)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Record the end of a micro-batch, and check that the watchdog process runs."""
        if self._own_times is not None:
            self._own_times.note()
        self._beat(Phase.BETWEEN)
        if self._process is not None and self._process.poll() is not None:
            self._statuses[0] = Status(
                STATUS_NAME,
                "refused",
                f"its process ended with code {self._process.returncode}; ranks are no longer watched",
            )
            rank_zero_warn(f"Watchdog: {self._statuses[0].reason}.")
            self._stop()

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Stop the clock until the next training batch."""
        self._beat(Phase.PAUSED)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop watching."""
        self._stop()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Stop watching."""
        self._stop()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Tell the other ranks why this one ends; a single rank stops watching."""
        if self._is_alone:
            self._stop()
            return
        phase = Phase.FAILED if isinstance(exception, Exception) else Phase.LEAVING
        self._beat(phase, failed_at_s=time.time(), text=f"{type(exception).__name__}: {exception}".partition("\n")[0])

    def _beat(self, phase: Phase, *, failed_at_s: float = 0.0, text: str = "") -> None:
        if self._memory is not None:
            self._num_beats += 1
            is_first = self._step - 1 - self._first_step < FIRST_STEPS
            own_s = 0.0
            if self._own_times is not None:
                own_s = self._own_times.median_s
                if phase == Phase.PAUSED:
                    self._own_times.pause()
            place = (self._num_beats, self._num_batches, self._step, phase, is_first)
            write_beat(self._memory, Beat(*place, failed_at_s, own_s, text))

    def _start(self, trainer: Trainer, folder: Path, *, run: str) -> None:
        """Start the watchdog process of this rank."""
        self._step = trainer.global_step + 1
        if trainer.num_nodes > 1:
            times, device = _OwnTimes(), trainer.strategy.root_device
            # DDP calls the module after it has broadcast its buffers, in which ranks wait for each other.
            hook = trainer.lightning_module.register_forward_pre_hook(lambda *_: times.begin(device))
            patcher_of(trainer).add_undo(hook.remove)
            self._own_times = times
        meeting = folder / f".watchdog-{run}"
        meeting.mkdir(parents=True, exist_ok=True)
        # A real-time signal, because nothing else uses them; macOS has none.
        stacks_signal = signal.SIGRTMAX - 1 if hasattr(signal, "SIGRTMAX") else 0
        self._stacks = tempfile.TemporaryFile()  # noqa: SIM115 - open until the run ends
        if stacks_signal:
            faulthandler.register(stacks_signal, file=self._stacks, all_threads=True)
        with tempfile.TemporaryFile() as record:
            record.truncate(RECORD_BYTES)
            self._memory = mmap.mmap(record.fileno(), RECORD_BYTES)
            self._beat(Phase.PAUSED)
            job = Job(
                rank=trainer.global_rank,
                num_ranks=trainer.world_size,
                node=trainer.node_rank,
                num_nodes=trainer.num_nodes,
                pid=os.getpid(),
                timeout_s=self.timeout_s,
                first_timeout_s=self.timeout_s * self.first_steps_factor,
                record_fd=record.fileno(),
                stacks_fd=self._stacks.fileno(),
                stacks_signal=int(stacks_signal),
                folder=str(folder),
                meeting=str(meeting),
            )
            # In its own session: Ctrl-C and SIGHUP are for the rank.
            self._process = subprocess.Popen(  # noqa: S603 - this interpreter, with a file of this package
                [sys.executable, "-I", "-S", rank_watch.ENTRY, json.dumps(job._asdict())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=(job.record_fd, job.stacks_fd),
                start_new_session=True,
            )
        # Every rank is watched before the first batch of any rank.
        if self._process.stdout is not None:
            self._process.stdout.read()
            self._process.stdout.close()
        trainer.strategy.barrier()

    def _stop(self) -> None:
        """End the watchdog process; a second call does nothing."""
        if self._memory is None or self._process is None or self._stacks is None:
            return
        self._beat(Phase.DONE)
        if self._process.poll() is None and self._process.stdin is not None:
            self._process.stdin.close()
            self._process.wait()
        if hasattr(signal, "SIGRTMAX"):
            faulthandler.unregister(signal.SIGRTMAX - 1)
        self._stacks.close()
        self._memory.close()
        self._process = self._memory = self._stacks = self._own_times = None


class _OwnTimes:
    """Times of the last micro-batches until their backward: the wait for the batch, and the forward on the device."""

    def __init__(self) -> None:
        self.median_s = 0.0
        self._times: deque[float] = deque(maxlen=NUM_TIMES)
        self._waiting: deque[tuple[float, Any, Any]] = deque()
        self._ended_s: float | None = None
        self._loading_s = 0.0
        self._begin: Any = None

    def load(self) -> None:
        self._loading_s = 0.0 if self._ended_s is None else time.perf_counter() - self._ended_s

    def begin(self, device: torch.device) -> None:
        self._begin = mark_time(device)

    def end(self, device: torch.device) -> None:
        # With manual optimization a micro-batch may have several backwards.
        if self._begin is not None:
            self._waiting.append((self._loading_s, self._begin, mark_time(device)))
            self._begin = None

    def note(self) -> None:
        while self._waiting and has_passed(self._waiting[0][2]):
            loading_s, begin, end = self._waiting.popleft()
            self._times.append(loading_s + ms_between(begin, end) / 1e3)
        if len(self._times) == NUM_TIMES:
            self.median_s = statistics.median(self._times)
        self._ended_s = time.perf_counter()

    def pause(self) -> None:
        self._ended_s = None
