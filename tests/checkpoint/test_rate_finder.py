"""A resumed run with LearningRateFinder goes on at its checkpoint, without a search."""

import pytest
import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import LearningRateFinder

from tests.support.fine_tuners import trainable, tuner
from tests.support.training_parts import SaveAtStep, quiet_data, quiet_trainer

ROWS = [{"input_ids": [number, 2, 3, 4, 5, 6]} for number in range(7, 11)]


class CountingFinder(LearningRateFinder):
    num_searches = 0

    def lr_find(self, trainer, pl_module):
        self.num_searches += 1
        super().lr_find(trainer, pl_module)


def run(folder, *callbacks, ckpt_path=None, **options):
    seed_everything(7, verbose=False)
    module = tuner("lora")
    options = {"strategy": "fastft", "max_steps": -1, "max_epochs": 2, **options}
    trainer = quiet_trainer(folder, callbacks=list(callbacks), **options)
    trainer.fit(module, quiet_data(ROWS, max_tokens=6), ckpt_path=ckpt_path)
    return module, trainer


@pytest.mark.filterwarnings("ignore:Resumed with another setting")
def test_a_resumed_run_searches_no_rate_and_equals_an_uninterrupted_one(tmp_path):
    path, first, later = tmp_path / "a.ckpt", CountingFinder(num_training_steps=5), CountingFinder(num_training_steps=5)
    whole, trainer = run(tmp_path, first, SaveAtStep(5, path))
    assert (first.num_searches, trainer.global_step) == (1, 8)
    resumed, trainer = run(tmp_path, later, ckpt_path=path)
    assert (later.num_searches, trainer.global_step) == (0, 8)
    assert all(torch.equal(weight, trainable(resumed)[name]) for name, weight in trainable(whole).items())
    # The next fit is a new run.
    run(tmp_path, later)
    assert later.num_searches == 1


def test_a_resumed_fit_that_trains_nothing_leaves_the_callback_as_it_was(tmp_path):
    path, finder = tmp_path / "a.ckpt", CountingFinder(num_training_steps=5)
    run(tmp_path, SaveAtStep(8, path))
    run(tmp_path, finder, ckpt_path=path)
    assert "lr_find" not in vars(finder)
