"""A rehearsal on the meta device finds the launches of a run: the same kernels, options and kinds of arguments."""

import functools
import sys

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback

from lightning_fastft.callbacks.fused_kernels import FusedKernels, swaps_of
from lightning_fastft.estimate.rehearsal import record_launches
from lightning_fastft.fused import install
from lightning_fastft.hf.dtypes import DTYPES
from lightning_fastft.kernels import launch as launches
from lightning_fastft.kernels.launch import LaunchRecorder
from tests.support.fine_tuners import CONFIG, tuner
from tests.support.training_parts import quiet_data, quiet_trainer

pytest.importorskip("triton")

# Heads are not shared: the attention of a run on the CPU and the rehearsed one return their gradients differently.
SIZES = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "num_key_value_heads": 4}
NUM_TOKENS = 128


def kind(argument):
    """What Triton compiles for, without the device."""
    if isinstance(argument, tuple):
        return tuple(map(kind, argument))
    kinds = launches._kinds((argument,))
    return tuple(kinds[:2] if isinstance(argument, torch.Tensor) else kinds)


def codes(recorded):
    found = {}
    for launch in recorded:
        name = launch.kernel.fn.__module__.split(".")[-2], launch.kernel.fn.__name__
        found.setdefault(name, set()).add((*map(str, launch.options.items()), *map(kind, launch.arguments)))
    return found


def launches_of_a_run(module, tmp_path, monkeypatch):
    """Train one step on the CPU that chooses Triton's kernels and records their launches instead of making them."""
    recorder, swaps = LaunchRecorder(), []

    for name, each in list(sys.modules.items()):
        if name.startswith("lightning_fastft.") and hasattr(each, "uses_triton"):
            monkeypatch.setattr(each, "uses_triton", lambda device: True)
    # As on a GPU.
    fuse = functools.partial(install.fuse_weight_buffers, device_types=("cpu",))
    monkeypatch.setattr(install, "fuse_weight_buffers", fuse)
    rows = [{"input_ids": [3 + (7 * place + step) % 20 for place in range(40)]} for step in range(6)]
    data = quiet_data(rows, max_tokens=NUM_TOKENS, pad_to_max=True)
    watch = LambdaCallback(
        on_fit_start=lambda *_: monkeypatch.setattr(launches, "current_recorder", lambda: recorder),
        on_train_start=lambda trainer, _: swaps.append(swaps_of(trainer)),
    )
    trainer = quiet_trainer(tmp_path, strategy="fastft", max_steps=1, callbacks=[FusedKernels(), watch])
    trainer.fit(module, datamodule=data)
    return list(recorder.launches.values()), swaps[0]


@pytest.mark.parametrize("mode", ["full_bf16", "lora_bf16", "qlora"])
def test_a_rehearsal_finds_what_a_run_launches(mode, tmp_path, monkeypatch):
    module = tuner("lora_bf16" if mode == "full_bf16" else mode, **({"lora": None} if mode == "full_bf16" else {}))
    module.source = type(module.source)({**CONFIG, **SIZES}, init="random")
    state, default = torch.get_rng_state(), torch.get_default_dtype()
    config = module.source.config.to_dict()
    launched, swaps = launches_of_a_run(module, tmp_path, monkeypatch)
    monkeypatch.undo()
    torch.set_rng_state(state)
    found = record_launches(
        module.source,
        num_tokens=NUM_TOKENS,
        quantization=module.quantization,
        lora=module.lora,
        dtype=DTYPES[module.dtype_name],
        swaps=swaps,
    )
    expected = {name: code for name, code in codes(launched).items() if name[0] != "adamw_step"}
    assert len(expected) >= 7
    assert codes(found) == expected
    # It leaves no trace.
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_default_dtype() is default
    assert module.source.config.to_dict() == config
