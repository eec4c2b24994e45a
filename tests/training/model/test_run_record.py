"""The record of a run in its checkpoints."""

import warnings

import pytest

from lightning_fastft.strategies.single_device import FastFTStrategy
from lightning_fastft.training.fine_tuner import FineTuner
from lightning_fastft.training.preference import PreferenceTuner
from tests.support.training_parts import quiet_trainer
from tests.training.test_tuner_tasks import LORA, digit_rows, make, make_data

PAIRS = digit_rows(8)
TEXTS = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in PAIRS]


@pytest.fixture
def checkpoint(tmp_path):
    trainer = quiet_trainer(tmp_path, strategy=FastFTStrategy(), max_steps=1)
    trainer.fit(make(PreferenceTuner, lora=LORA), make_data(PAIRS))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    return tmp_path / "a.ckpt"


@pytest.mark.parametrize("verb", ["validate", "test"])
def test_another_tuner_than_that_of_the_checkpoint_is_warned_of(tmp_path, checkpoint, verb):
    trainer = quiet_trainer(tmp_path, strategy=FastFTStrategy())
    data = make_data(TEXTS, val_paths=TEXTS, test_paths=TEXTS)
    with pytest.warns(UserWarning, match="trained with PreferenceTuner and is loaded into FineTuner"):
        getattr(trainer, verb)(make(FineTuner, lora=LORA), data, ckpt_path=checkpoint, verbose=False)


class OwnTuner(PreferenceTuner):
    """A user's subclass."""


@pytest.mark.parametrize("kind", [PreferenceTuner, OwnTuner])
def test_the_tuner_of_the_checkpoint_is_not_warned_of(tmp_path, checkpoint, kind):
    trainer = quiet_trainer(tmp_path, strategy=FastFTStrategy())
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*is loaded into")
        trainer.validate(make(kind, lora=LORA), make_data(PAIRS, val_paths=PAIRS), ckpt_path=checkpoint, verbose=False)


def test_predictions_of_another_tuner_are_not_warned_of(tmp_path, checkpoint):
    trainer = quiet_trainer(tmp_path, strategy=FastFTStrategy())
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*is loaded into")
        trainer.predict(make(FineTuner, lora=LORA), make_data(TEXTS, predict_paths=TEXTS), ckpt_path=checkpoint)
