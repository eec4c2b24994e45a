"""The logs of a run that a signal stopped and of the run that resumes it have each step once, as one run has."""

import contextlib
import csv
import os
import signal
from pathlib import Path

import pytest
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger

from tests.support.training_parts import PlainModule, quiet_data, quiet_trainer, tiny_llama

ROWS = [{"input_ids": [number, 2, 3, 4, 5, 6]} for number in range(7, 15)]


class StopIn(Callback):
    """A signal in the third micro-batch of training, or in the first batch of a validation."""

    def __init__(self, hook):
        self.hook, self.is_told = hook, False

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.tell("on_train_batch_start", batch_idx == 2)

    def on_validation_batch_start(self, trainer, module, batch, batch_idx):
        self.tell("on_validation_batch_start", batch_idx == 0)

    def tell(self, hook, is_time):
        if is_time and hook == self.hook and not self.is_told:
            self.is_told = True
            os.kill(os.getpid(), signal.SIGTERM)


def losses(folder, *callbacks, ckpt_path=None):
    seed_everything(7, verbose=False)
    logger = CSVLogger(folder)
    options = {"logger": logger, "log_every_n_steps": 1, "accumulate_grad_batches": 2, "val_check_interval": 4}
    trainer = quiet_trainer(
        folder, strategy="fastft", max_steps=4, num_sanity_val_steps=0, callbacks=list(callbacks), **options
    )
    data = quiet_data(ROWS, val_paths=ROWS[:2], max_tokens=6)
    with pytest.raises(SystemExit) if callbacks else contextlib.nullcontext():
        trainer.fit(PlainModule(tiny_llama()), data, ckpt_path=ckpt_path)
    with (Path(logger.log_dir) / "metrics.csv").open() as file:
        return [(row["step"], row["train_loss"]) for row in csv.DictReader(file) if row["train_loss"]]


@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_validation_batch_start"])
def test_no_step_is_missing_or_logged_twice(tmp_path, hook):
    whole = losses(tmp_path / "whole")
    stopped = losses(tmp_path / "parts", StopIn(hook))
    (path,) = (tmp_path / "parts").glob("stopped-*.ckpt")
    assert stopped + losses(tmp_path / "parts", ckpt_path=path) == whole
    assert (len(stopped), len(whole)) == (2, 4)
