"""The cap on reserved memory: its order of calls, settings of the user, and how it is lifted."""

import sys
from types import SimpleNamespace

import pytest
import torch

from lightning_fastft.activations import budgets
from lightning_fastft.activations.checkpointing import MEMORY_STATUS, OffloadCheckpointing
from lightning_fastft.core.errors import OptionError
from lightning_fastft.core.patcher import ModelPatcher
from lightning_fastft.strategies.single_device import FastFTStrategy
from lightning_fastft.training.fine_tuner import FineTuner
from tests.support.training_parts import VOCAB_SIZE, packed_loader, quiet_trainer

GIB = 2**30
DEVICE = torch.device("cuda", 0)


@pytest.fixture
def calls(monkeypatch):
    """The calls to a fake allocator of 80 GiB that has reserved 1 GiB."""
    seen = []
    note = {
        "empty_cache": lambda: seen.append("empty_cache"),
        "memory_reserved": lambda device: GIB,
        "max_memory_reserved": lambda device: 7 * GIB,
        "max_memory_allocated": lambda device: 6 * GIB,
        "get_device_properties": lambda device: SimpleNamespace(total_memory=80 * GIB),
        "get_per_process_memory_fraction": lambda device: 1.0,
        "set_per_process_memory_fraction": lambda share, device: seen.append(share),
        "get_allocator_backend": lambda: "native",
    }
    for name, function in note.items():
        monkeypatch.setattr(torch.cuda, name, function, raising=False)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", seen.append, raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    return seen


# A segment below the budget, by which the allocator may pass the cap.
CAP = (8 * GIB - 20 * 2**20) / (80 * GIB)
WHOLE = ["expandable_segments:True", "empty_cache", CAP, 1.0, "expandable_segments:False"]


@pytest.mark.parametrize("weights", ["auto", "resident"])
def test_a_run_expands_segments_and_is_capped_until_it_ends(calls, weights):
    checkpointing, patcher = OffloadCheckpointing("auto", vram_budget=8, weights=weights), ModelPatcher()
    checkpointing.cap(DEVICE, patcher)
    checkpointing.cap(DEVICE, patcher)
    patcher.undo()
    assert calls == WHOLE


def test_a_streamed_model_is_capped_while_it_loads_or_when_it_has_left_the_device(calls, monkeypatch):
    checkpointing, patcher = OffloadCheckpointing("auto", vram_budget=8, weights="stream"), ModelPatcher()
    checkpointing.cap(DEVICE, patcher)
    patcher.undo()
    assert calls == WHOLE
    calls.clear()
    reserved = [9 * GIB]
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: reserved[0])
    checkpointing.cap(DEVICE, patcher)
    assert calls == WHOLE[:1]
    reserved[0] = GIB
    checkpointing.stacks.append(object())
    checkpointing.cap(DEVICE, patcher)
    checkpointing.stacks.clear()
    patcher.undo()
    assert calls == WHOLE


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_settings_of_the_user_stay(calls, monkeypatch, name):
    monkeypatch.setenv(name, "max_split_size_mb:512")
    assert budgets.expand_segments() is None
    assert not calls


def test_another_allocator_and_a_lower_cap_stay(calls, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: 0.05)
    assert budgets.expand_segments() is None
    budgets.cap_memory(DEVICE, 8 * GIB)()
    assert calls == ["empty_cache", 0.05, 0.05]


def test_a_process_that_holds_more_is_refused_before_anything_changes(calls):
    with pytest.raises(OptionError, match=r"vram_budget is 0.50 GiB, and this process holds 1.00 GiB"):
        budgets.cap_memory(DEVICE, GIB // 2)
    assert calls == ["empty_cache"]


def test_a_policy_caps_at_its_budget_says_so_and_raises_it_after_a_failure(calls):
    checkpointing, patcher = OffloadCheckpointing("auto", vram_budget=8), ModelPatcher()
    checkpointing.cap(DEVICE, patcher)
    status = next(status for status in checkpointing.memory_statuses() if status.name == MEMORY_STATUS)
    assert status.reason == "capped at vram_budget, 8.00 GiB reserved; peak 7.00 GiB reserved, 6.00 allocated"
    peak = SimpleNamespace(plan=SimpleNamespace(prediction=SimpleNamespace(peak_bytes=7 * GIB)))
    checkpointing.stacks.append(peak)
    assert checkpointing.advice() == "OffloadCheckpointing('auto', vram_budget=8.9)"
    patcher.undo()
    assert calls[-2:] == [1.0, "expandable_segments:False"]
    assert checkpointing.advice() == "OffloadCheckpointing('auto', vram_budget=6.3)"


@pytest.mark.parametrize(
    ("policy", "options"), [("auto", {}), ("auto", {"vram_budget": 80}), ("keep", {}), ("recompute", {})]
)
def test_a_run_without_a_lower_budget_expands_segments_without_a_cap(calls, policy, options):
    checkpointing, patcher = OffloadCheckpointing(policy, **options), ModelPatcher()
    checkpointing.cap(DEVICE, patcher)
    checkpointing.cap(DEVICE, patcher)
    patcher.undo()
    assert calls == ["expandable_segments:True", "expandable_segments:False"]


def test_the_allocator_stays_without_a_gpu(calls):
    OffloadCheckpointing("auto", vram_budget=8).cap(torch.device("cpu"), ModelPatcher())
    assert not calls


class Capped(OffloadCheckpointing):
    """Records when the cap is set and lifted."""

    def cap(self, device, patcher):
        self.events.append(f"cap {device}")
        patcher.add_undo(lambda: self.events.append("lift"))

    def place(self, device):
        self.events.append("place")

    def attach(self, *args, **options):
        self.events.append("attach")
        return super().attach(*args, **options)


class Loading(FineTuner):
    """Runs out of memory, if asked, while it loads."""

    events = None
    fails = False

    def configure_model(self):
        self.events.append("load")
        if self.fails:
            raise torch.OutOfMemoryError("tried to allocate 2 GiB")
        super().configure_model()


def fit(folder, *, fails=False, weights="auto"):
    config = {
        "model_type": "llama", "vocab_size": VOCAB_SIZE, "hidden_size": 16, "intermediate_size": 32,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
    }  # fmt: skip
    activations = Capped("auto", vram_budget=8, weights=weights)
    tuner = Loading(config, init="random", dtype="float32", lora={"r": 2})
    tuner.events = activations.events = []
    tuner.fails = fails
    trainer = quiet_trainer(folder, strategy=FastFTStrategy(activations=activations), max_steps=1)
    try:
        trainer.fit(tuner, packed_loader(1))
    finally:
        assert tuner.events[-1] == "lift"
    return tuner.events


def test_a_run_is_capped_before_its_model_is_built_until_it_ends(tmp_path):
    assert fit(tmp_path) == ["cap cpu", "load", "attach", "place", "cap cpu", "lift", "lift"]
    # Before the model moves to the device, and after everything else is on it.
    streamed = fit(tmp_path, weights="stream")
    assert streamed == ["cap cpu", "load", "attach", "place", "place", "cap cpu", "lift", "lift"]


@pytest.mark.parametrize(("weights", "advice"), [("auto", "weights='stream'"), ("stream", "device_map='cpu'")])
def test_a_model_that_does_not_load_within_the_budget_names_it(tmp_path, weights, advice):
    with pytest.raises(torch.OutOfMemoryError) as found:
        fit(tmp_path, fails=True, weights=weights)
    message = str(found.value)
    assert message.startswith("The load ran out of memory on cpu")
    for part in ("Nothing was trained.", "vram_budget 8.0 GiB", "raise vram_budget", "tried to allocate 2 GiB", advice):
        assert part in message
    assert "batch" not in message
