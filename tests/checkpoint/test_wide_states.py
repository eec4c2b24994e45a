"""Optimizers that hold wider states than their weights are resumed to the bit, and dtypes that change are cast."""

from functools import partial

import pytest
import torch
from lightning.pytorch import seed_everything
from transformers.optimization import Adafactor

from lightning_fastft.training.optimizer import FusedAdamW
from tests.support.fine_tuners import trainable, tuner
from tests.support.training_parts import SaveAtStep, quiet_data, quiet_trainer

ROWS = [{"input_ids": [number, 2, 3, 4, 5, 6]} for number in range(7, 13)]
OPTIMIZERS = {
    "Adafactor": partial(Adafactor, lr=1e-2, relative_step=False, scale_parameter=False),
    "NAdam": partial(torch.optim.NAdam, lr=1e-2),
    "AdamW": partial(torch.optim.AdamW, lr=1e-2),
    "FusedAdamW": partial(FusedAdamW, lr=1e-2),
}


def run(folder, name, *, dtype="bfloat16", ckpt_path=None, callbacks=()):
    seed_everything(7, verbose=False)
    module = tuner("full", dtype=dtype, optimizer=OPTIMIZERS[name], learning_rate=None)
    trainer = quiet_trainer(folder, strategy="fastft", max_steps=6, callbacks=list(callbacks))
    trainer.fit(module, quiet_data(ROWS, max_tokens=6), ckpt_path=ckpt_path)
    return trainable(module), trainer.optimizers[0]


def dtypes_of(optimizer):
    held = [value for state in optimizer.state.values() for value in state.values()]
    return [value.dtype for value in held if isinstance(value, torch.Tensor)]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_run_on_bf16_weights_is_resumed_to_the_bit(tmp_path, name):
    weights, optimizer = run(tmp_path, name, callbacks=[SaveAtStep(3, tmp_path / "a.ckpt")])
    resumed, later = run(tmp_path, name, ckpt_path=tmp_path / "a.ckpt")
    assert all(torch.equal(weight, resumed[key]) for key, weight in weights.items())
    assert dtypes_of(later) == dtypes_of(optimizer)


@pytest.mark.filterwarnings("ignore:Resumed with another setting")
@pytest.mark.parametrize(("before", "now"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_states_follow_weights_whose_dtype_changes(tmp_path, before, now):
    run(tmp_path, "AdamW", dtype=before, callbacks=[SaveAtStep(3, tmp_path / "a.ckpt")])
    _, optimizer = run(tmp_path, "AdamW", dtype=now, ckpt_path=tmp_path / "a.ckpt")
    assert {state["exp_avg"].dtype for state in optimizer.state.values()} == {getattr(torch, now)}
