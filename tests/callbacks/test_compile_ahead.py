"""FusedKernels compiles the kernels of a run while the model is read, and a run does not depend on it."""

import threading

import pytest
import torch

from lightning_fastft.callbacks import fused_kernels
from lightning_fastft.callbacks.fused_kernels import FusedKernels
from lightning_fastft.core.errors import DataError
from lightning_fastft.core.phases import LOGGER
from lightning_fastft.estimate import rehearsal
from lightning_fastft.hf.loading import model as loading
from lightning_fastft.kernels.launch import Launch
from tests.support.fine_tuners import trainable, tuner
from tests.support.training_parts import quiet_data, quiet_trainer

pytest.importorskip("triton")


class AsOnGpu(FusedKernels):
    """Compile ahead on the CPU too."""

    def before_model(self, trainer, pl_module):
        self._compile_ahead(trainer, pl_module)


@pytest.fixture
def compiled(monkeypatch):
    """Kernels by the threads that would have compiled them."""
    found = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(
        Launch, "compile", lambda self: found.append((self.kernel.fn.__name__, threading.current_thread().name))
    )
    return found


def fit(folder, callback):
    torch.manual_seed(3)
    module = tuner("lora_bf16")
    rows = [{"input_ids": [3 + (7 * place + step) % 20 for place in range(40)]} for step in range(6)]
    data = quiet_data(rows, max_tokens=64, pad_to_max=True)
    trainer = quiet_trainer(folder, strategy="fastft", max_steps=2, callbacks=[callback])
    try:
        trainer.fit(module, datamodule=data)
    finally:
        assert not [thread for thread in threading.enumerate() if "fastft-compile" in thread.name]
    return {name: parameter.detach().clone() for name, parameter in trainable(module).items()}, (module, data)


def are_equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_run_on_a_gpu_compiles_its_kernels_in_threads_and_trains_the_same(tmp_path, compiled):
    plain, _ = fit(tmp_path, FusedKernels())
    assert compiled == []
    ahead, (module, data) = fit(tmp_path, AsOnGpu())
    assert are_equal(ahead, plain)
    assert {"_rms_norm_forward_kernel", "_row_loss_kernel"} <= {name for name, _ in compiled}
    assert all("fastft-compile" in thread for _, thread in compiled)
    # The model is there, and so are its kernels.
    compiled.clear()
    quiet_trainer(tmp_path, strategy="fastft", max_steps=1, callbacks=[AsOnGpu()]).fit(module, datamodule=data)
    assert compiled == []


def refuse(*_, **__):
    raise KeyError("no such operation")


@pytest.mark.parametrize(
    ("owner", "name", "message"),
    [
        (Launch, "compile", "kernels were not compiled ahead of the first step: KeyError"),
        (rehearsal, "record_launches", "kernels are compiled at their first launch: KeyError"),
    ],
    ids=["compilation", "rehearsal"],
)
def test_a_failure_ahead_changes_no_run_and_is_reported_once(
    tmp_path, compiled, monkeypatch, caplog, owner, name, message
):
    plain, _ = fit(tmp_path, FusedKernels())
    monkeypatch.setattr(owner, name, refuse)
    with caplog.at_level("INFO", LOGGER.name):
        ahead, _ = fit(tmp_path, AsOnGpu())
    assert are_equal(ahead, plain)
    assert sum(message in record.getMessage() for record in caplog.records) == 1


def test_a_model_that_cannot_be_read_leaves_no_threads(tmp_path, compiled, monkeypatch):
    def fail(*_, **__):
        raise DataError("no weights")

    monkeypatch.setattr(loading, "initialise", fail)
    cancelled = []
    cancel = fused_kernels.Compilation.cancel
    monkeypatch.setattr(fused_kernels.Compilation, "cancel", lambda self: cancelled.append(1) or cancel(self))
    with pytest.raises(DataError, match="no weights"):
        fit(tmp_path, AsOnGpu())
    assert cancelled
