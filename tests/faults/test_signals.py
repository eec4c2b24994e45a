"""R6: a signal at any moment of training ends the run at an optimizer step, in a good checkpoint, with an exit
code that says so.
"""

import logging
import os
import random
import signal
import time

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from lightning_fastft.checkpoint.files import check_file
from tests.faults.saves import fork
from tests.faults.signal_worker import SignalToSelf
from tests.parity.resume_worker import ACCUMULATE, differences, train
from tests.support.two_ranks import launch_two_ranks

NUM_SIGNALS = [pytest.param(2, id="2 signals"), pytest.param(50, id="50 signals", marks=pytest.mark.fault)]
# Long enough that no signal comes after the end.
LENGTH = {"max_steps": 60, "val_check_interval": 20}


class Tell(Callback):
    """Writes a byte per micro-batch to the parent."""

    def __init__(self, write):
        self.write = write

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        os.write(self.write, b"x")


@pytest.mark.parametrize("num_signals", NUM_SIGNALS)
def test_signals_end_in_a_checkpoint_at_a_step(tmp_path, num_signals):
    chance = random.Random(num_signals)
    whole = train("lora", "one", tmp_path / "whole", **LENGTH)
    num_good = num_exact = num_resumed = 0
    for trial in range(num_signals):
        folder = tmp_path / str(trial)
        number = (signal.SIGTERM, signal.SIGUSR1)[trial % 2]
        child, read = fork(
            lambda write, f=folder: train("lora", "one", f, keep=True, callbacks=[Tell(write)], **LENGTH)
        )
        num_begun = chance.randrange(1, 40)
        for _ in range(num_begun):
            assert os.read(read, 1) == b"x"
        time.sleep(chance.uniform(0, 0.05))
        os.kill(child, number)
        # A second one, in the middle of the save or not, changes nothing.
        time.sleep(chance.uniform(0, 0.02))
        second = chance.choice([signal.SIGTERM, signal.SIGUSR1])
        os.kill(child, second)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        os.close(read)
        stopped = list(folder.glob("stopped-step=*.ckpt"))
        # Two that come before the process runs again have no order.
        is_good = (
            code in (128 + number, 128 + second)
            and len(stopped) == 1
            and check_file(stopped[0])
            and not list(folder.glob(".*"))
        )
        state = torch.load(stopped[0], weights_only=True) if is_good else {}
        is_good = (
            is_good
            and state["PackedDataModule"]["micro_batches"]
            == state["global_step"] * ACCUMULATE
            >= num_begun - ACCUMULATE
        )
        num_good += is_good
        if is_good and trial % 5 == 0:
            num_resumed += 1
            resumed = train("lora", "one", tmp_path / "resumed", ckpt_path=stopped[0], **LENGTH)
            num_exact += not differences(whole, resumed, after=state["global_step"])
    print(
        f"R6: {num_good} of {num_signals} signals ended in a good checkpoint; {num_exact} of {num_resumed} resumed "
        "bit-equal to an unstopped run"
    )
    assert num_good == num_signals
    assert num_exact == num_resumed > 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_inside_a_window_waits_for_its_end(tmp_path, number):
    def run(write):
        # In the background of a shell interrupts are ignored, in a child too.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        train("lora", "one", tmp_path, callbacks=[SignalToSelf(0, number)], max_steps=10)

    child, read = fork(run)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 128 + number
    os.close(read)
    assert [path.name for path in tmp_path.glob("stopped-step=*")] == ["stopped-step=3.ckpt"]
    assert (
        torch.load(tmp_path / "stopped-step=3.ckpt", weights_only=True)["PackedDataModule"]["micro_batches"]
        == 3 * ACCUMULATE
    )


SLURM = {"SLURM_JOB_ID": "77", "SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}


@pytest.mark.parametrize("answer", ["true", "echo Requested operation not permitted >&2; false"])
def test_slurm_job_is_requeued_after_its_save_and_continues_by_itself(tmp_path, monkeypatch, answer):
    """With a scontrol of the test's own; tests/faults/test_clusters.py has a real one."""
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n{answer}\n')
    scontrol.chmod(0o755)
    whole = train("lora", "one", tmp_path / "whole", max_steps=10)
    for name, value in {**SLURM, "PATH": f"{tmp_path}:{os.environ['PATH']}"}.items():
        monkeypatch.setenv(name, value)
    folder = tmp_path / "job"

    def run(write):
        logging.getLogger("lightning.pytorch").addHandler(logging.FileHandler(tmp_path / "said"))
        train("lora", "one", folder, callbacks=[SignalToSelf(0, signal.SIGUSR1)], max_steps=10)

    child, read = fork(run)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 138
    os.close(read)
    said = (tmp_path / "said").read_text()
    assert (tmp_path / "asked").read_text() == "requeue 77\n"
    expected = "SLURM requeues job 77" if answer == "true" else "did not requeue job 77: Requested operation not"
    assert expected in said
    assert [path.name for path in folder.glob("*.ckpt")] == ["stopped-step=3.ckpt"]
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert not differences(whole, train("lora", "one", folder, max_steps=10), after=3)


class SignalInValidation(Callback):
    """A real signal in the second batch of the second validation."""

    def __init__(self):
        self.num_validations = 0

    def on_validation_start(self, trainer, pl_module):
        self.num_validations += not trainer.sanity_checking

    def on_validation_batch_start(self, trainer, pl_module, batch, batch_idx):
        if self.num_validations == 2 and batch_idx == 1:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("val_check_interval", [6, 9])
def test_run_that_was_stopped_in_a_validation_goes_on_bit_for_bit(tmp_path, val_check_interval):
    """Behind a whole window, and inside one."""
    options = {"max_steps": 20, "val_check_interval": val_check_interval}
    whole = train("lora", "one", tmp_path / "whole", **options)
    child, read = fork(lambda write: train("lora", "one", tmp_path, callbacks=[SignalInValidation()], **options))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 143
    os.close(read)
    (stopped,) = tmp_path.glob("stopped-step=*.ckpt")
    step = torch.load(stopped, weights_only=True)["global_step"]
    assert not differences(whole, train("lora", "one", tmp_path / "resumed", ckpt_path=stopped, **options), after=step)


@pytest.mark.fault
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_signal_to_one_rank_ends_all_of_them(tmp_path, strategy):
    launch_two_ranks("tests.faults.signal_worker", strategy, tmp_path, timeout_s=120)
    assert [(tmp_path / f"rank{rank}").read_text() for rank in range(2)] == ["138", "138"]
    # The signal comes in step 3; the ranks vote at its end and read the vote in the validation that follows.
    assert [path.name for path in tmp_path.glob("stopped-step=*")] == ["stopped-step=3.ckpt"]
