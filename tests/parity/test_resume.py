"""R4: a resumed run equals the continuation of the run that was saved, to the bit: losses, draws, batches,
weights, moments, learning rate.
"""

import pytest
import torch

from tests.parity.resume_worker import ACCUMULATE, KINDS, NUM_STEPS, differences, resume_from, train
from tests.support.datamodule_worker import SaveAt
from tests.support.two_ranks import launch_two_ranks

STOPS = range(1, NUM_STEPS)


def judge(found, name):
    exact = sum(not what for what in found.values())
    print(f"R4: {name}: {exact} of {len(found)} resumed runs bit-equal to the continuation")
    assert {stop: what for stop, what in found.items() if what} == {}


def test_three_stops_and_two_saves_inside_windows_are_exact(tmp_path):
    """The saves inside a window: in its first micro-batch, and during a validation that falls into one."""
    inside = [SaveAt(tmp_path / "window.ckpt", micro_batch=15), SaveAt(tmp_path / "validation.ckpt", validation=1)]
    whole = train("lora", "one", tmp_path, keep=True, callbacks=inside, val_check_interval=9)
    options = {"val_check_interval": 9}
    found = {
        stop: differences(
            whole, train("lora", "one", tmp_path, ckpt_path=tmp_path / f"step={stop}.ckpt", **options), after=stop
        )
        for stop in (3, 8, 12)
    }
    for name in ("window", "validation"):
        state = torch.load(tmp_path / f"{name}.ckpt", weights_only=True)
        assert state["PackedDataModule"]["micro_batches"] % ACCUMULATE == 1
        resumed = train("lora", "one", tmp_path, ckpt_path=tmp_path / f"{name}.ckpt", **options)
        found[name] = differences(whole, resumed, after=state["global_step"])
    judge(found, "lora, one device")


@pytest.mark.fault
@pytest.mark.parametrize("kind", KINDS)
def test_every_stop_is_exact_on_one_device(tmp_path, kind):
    judge(resume_from(STOPS, kind, "one", tmp_path), f"{kind}, one device")


@pytest.mark.fault
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_stop_is_exact_on_two_ranks(tmp_path, kind, strategy):
    launch_two_ranks("tests.parity.resume_worker", strategy, kind, tmp_path, *STOPS, timeout_s=600)
    for rank, found in enumerate(torch.load(tmp_path / "found.pt")):
        judge(found, f"{kind}, {strategy}, rank {rank} of 2")
