"""Options of DataModules as hyperparameters: in logs and checkpoints, beside those of the LightningModule."""

import re

import datasets
import pytest
import torch
import yaml
from lightning.fabric.utilities.logger import _flatten_dict
from lightning.pytorch.loggers import CSVLogger
from transformers import PreTrainedTokenizerFast

from lightning_fastft.training.datamodule import PackedDataModule
from lightning_fastft.training.policy import PolicyTuner
from lightning_fastft.training.rollouts import RolloutDataModule
from tests.support.datamodule_worker import TinyModel, make_data, make_rows, make_trainer
from tests.support.fine_tuners import LORA, tuner, word_tokenizer
from tests.support.training_parts import quiet_trainer
from tests.training.test_rollouts import CONFIG, character_tokenizer

ROWS = [{"input_ids": [3, 4, 5]}] * 20
# MLflow takes these in names, and no path that begins with a slash or has two.
NAME = r"(?!.*//)[^/][\w.: /-]*"


class Evaluated(TinyModel):
    def test_step(self, batch, batch_idx):
        self.log("test_loss", self.loss(batch))


class WithOptions(Evaluated):
    def __init__(self, seed, max_tokens):
        super().__init__()
        self.save_hyperparameters()


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"input_ids": [1, 2, 3]}\n' * 9)
    return path


def logged(trainer):
    with open(f"{trainer.logger.log_dir}/hparams.yaml") as file:
        return yaml.safe_load(file)


def test_options_of_data_and_tuner_are_logged_together(tmp_path, path):
    data = make_data(rows={path: 3, f"{tmp_path}/*.jsonl": 1}, val_paths={"math": [path]}, columns={"text": "a b"})
    trainer = quiet_trainer(tmp_path, strategy="fastft", logger=CSVLogger(tmp_path), max_steps=1)
    trainer.fit(tuner(lora={**LORA, "rank_pattern": {"^.*q_proj$": 4}}, learning_rate=0.5), data)
    found = logged(trainer)
    assert found["max_tokens"] == 64
    assert found["learning_rate"] == 0.5
    assert yaml.safe_load(found["paths"]) == {str(path): 3, f"{tmp_path}/*.jsonl": 1}
    assert found["val_paths"] == {"math": [str(path)]}
    assert found["columns"] == {"text": "a b"}
    for name in _flatten_dict(found):
        assert re.fullmatch(NAME, name)


def test_rows_data_sets_and_tokenizers_are_not_recorded(path):
    split = datasets.Dataset.from_list(ROWS)
    for rows in (ROWS, split, [split], [str(path), split], tuple(ROWS)):
        assert "paths" not in make_data(rows=rows).hparams
    for sets in ({"a": str(path), "b": ROWS}, {"a": split}, datasets.DatasetDict({"a": split})):
        assert "val_paths" not in make_data(val_paths=sets).hparams
    tokenizer = word_tokenizer()
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    assert "tokenizer" not in make_data(tokenizer=tokenizer).hparams
    assert make_data(rows=[path], tokenizer="folder").hparams["paths"] == [str(path)]


def test_a_checkpoint_holds_the_options_and_makes_the_data_again(tmp_path, path):
    data = make_data(rows={path: 3}, val_paths=path, seed=7)
    trainer = make_trainer(tmp_path, max_steps=1)
    trainer.fit(TinyModel(), data)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    torch.load(tmp_path / "a.ckpt", weights_only=True)
    again = PackedDataModule.load_from_checkpoint(tmp_path / "a.ckpt", weights_only=True)
    assert again.hparams == data.hparams
    assert (again.seed, again.max_tokens) == (7, 64)


def test_two_values_of_one_name_are_both_logged(tmp_path, path):
    trainer = make_trainer(tmp_path, logger=CSVLogger(tmp_path), max_steps=1)
    trainer.fit(WithOptions(seed=1, max_tokens=64), make_data(rows=path, seed=5))
    found = logged(trainer)
    assert (found["seed"], found["data/seed"]) == (1, 5)
    assert found["max_tokens"] == 64
    assert "data/max_tokens" not in found


def test_a_tuner_and_its_data_can_have_tokenizers_of_their_own(tmp_path):
    module = tuner("lora")
    word_tokenizer().save_pretrained(tmp_path / "tokenizer")
    module.save_hyperparameters({"tokenizer": "other"})
    trainer = quiet_trainer(tmp_path, strategy="fastft", logger=CSVLogger(tmp_path), max_steps=1)
    trainer.fit(module, make_data(rows=ROWS, tokenizer=str(tmp_path / "tokenizer")))
    assert logged(trainer)["data/tokenizer"] == str(tmp_path / "tokenizer")


def test_a_test_on_other_data_changes_nothing_that_was_logged(tmp_path, path):
    trainer = make_trainer(tmp_path, logger=CSVLogger(tmp_path), max_steps=1)
    trainer.fit(model := Evaluated(), make_data(rows=path))
    found = logged(trainer)
    trainer.test(model, make_data(rows=None, test_paths=make_rows(9), max_tokens=128), verbose=False)
    assert logged(trainer) == found
    assert found["paths"] == str(path)


def test_rollouts_record_their_options():
    data = RolloutDataModule([{"prompt": "two"}], rewards=len, num_completions=3, temperature=0.5)
    assert data.hparams["num_completions"] == 3
    assert not {"prompts", "rewards", "sampler"} & data.hparams.keys()
    module = PolicyTuner(CONFIG, init="random", tokenizer=character_tokenizer(), temperature=0.5)
    assert module.hparams_initial["temperature"] == data.hparams_initial["temperature"]
