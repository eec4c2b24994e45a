"""A run that is killed anywhere, over and over, and started again with ckpt_path="last" ends as the run that
nobody killed, to the bit.
"""

import importlib
import os
import random
import signal
import time

import psutil
import pytest
import torch
from torch.utils._pytree import keystr, tree_flatten_with_path

from tests.faults.saves import fork
from tests.parity.resume_worker import NUM_STEPS, train

NUM_KILLS = [pytest.param(4, id="4-kills"), pytest.param(200, id="200-kills", marks=pytest.mark.fault)]
# Most runs are killed outright. Some are told to end, and leave a checkpoint of their own.
SIGNALS = [signal.SIGKILL] * 3 + [signal.SIGTERM]
# What a checkpoint holds of the training; the rest are paths and times.
COMPARED = ("state_dict", "optimizer_states", "lr_schedulers", "global_step", "PackedDataModule", "fastft_resume")


def start(folder):
    return fork(lambda write: train("lora", "one", folder, keep=True, save_last=True, ckpt_path="last"))


def wait_for(child, cpu_s):
    """Wait until a child has used that much processor time, which a busy machine does not change, or has ended."""
    process = psutil.Process(child)
    while process.status() != psutil.STATUS_ZOMBIE and sum(process.cpu_times()[:2]) < cpu_s:
        time.sleep(0.002)


def last_state(folder):
    checkpoint = torch.load(folder / "last.ckpt", weights_only=True)
    leaves, _ = tree_flatten_with_path({name: checkpoint[name] for name in COMPARED})
    return {keystr(path): value for path, value in leaves}


def differences(one, other):
    equal = lambda a, b: torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b  # noqa: E731
    return [
        name
        for name in one.keys() | other.keys()
        if name not in one or name not in other or not equal(one[name], other[name])
    ]


@pytest.mark.parametrize("num_kills", NUM_KILLS)
def test_killed_runs_end_as_the_run_that_nobody_killed(tmp_path, num_kills):
    # All that a child would import first, so that most kills meet training and saving.
    for name in ("bitsandbytes", "peft", "transformers.models.llama.modeling_llama"):
        importlib.import_module(name)
    # The second time: the first run loads what every later one has loaded.
    for folder in (tmp_path / "first", tmp_path / "whole"):
        child, _ = start(folder)
        _, code, usage = os.wait4(child, 0)
        assert code == 0
        whole_s = usage.ru_utime + usage.ru_stime
    whole = last_state(tmp_path / "whole")
    assert whole["['global_step']"] == NUM_STEPS
    chance = random.Random(num_kills)
    num_killed = num_runs = 0
    while num_killed < num_kills:
        num_runs += 1
        folder = tmp_path / str(num_runs)
        code = None
        while code != 0:
            child, read = start(folder)
            if num_killed < num_kills:
                wait_for(child, chance.uniform(0, whole_s))
                os.kill(child, chance.choice(SIGNALS))
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            os.close(read)
            num_killed += code != 0
            assert code in (0, -signal.SIGKILL, -signal.SIGTERM, 128 + signal.SIGTERM)
        assert differences(last_state(folder), whole) == []
        assert not [path for path in folder.rglob("*") if ".part" in path.name]
    print(f"{num_killed} kills in {num_runs} runs, each bit-equal in the end to the run that nobody killed")
