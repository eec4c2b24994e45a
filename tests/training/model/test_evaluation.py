"""Metrics of named validation and test sets: each under its name, and all of them together."""

import re
from itertools import chain

import datasets
import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from lightning_fastft.core.errors import DataError, OptionError
from lightning_fastft.monitor.data_page import render_data_page
from lightning_fastft.monitor.run_report import RunReport
from lightning_fastft.strategies.single_device import FastFTStrategy
from lightning_fastft.training.data.describe import describe_data
from lightning_fastft.training.preference import PreferenceTuner
from tests.support.datamodule_worker import TinyModel, make_data, rows_in
from tests.support.datamodule_worker import make_rows as make_numbered_rows
from tests.support.fine_tuners import tuner
from tests.support.training_parts import quiet_trainer
from tests.support.two_ranks import run_two_ranks
from tests.training.named_sets_worker import SETS, read_metrics, train
from tests.training.test_tuner_tasks import digit_rows, make
from tests.training.test_tuner_tasks import make_data as make_tuner_data

METRICS = ("loss", "perplexity", "token_accuracy")


def validate(module, rows):
    (found,) = quiet_trainer(strategy="fastft").validate(module, make_data(rows=None, val_paths=rows), verbose=False)
    return found


def test_each_set_is_logged_by_name_and_all_together_by_tokens(tmp_path):
    module, trainer, data = train(tmp_path)
    found = read_metrics(trainer)
    joined = validate(module, [row for rows in SETS.values() for row in rows])
    for metric in METRICS:
        assert found[f"val_{metric}"] == pytest.approx(joined[f"val_{metric}"], rel=1e-6)
        for name, rows in SETS.items():
            assert found[f"val_{metric}/{name}"] == pytest.approx(validate(module, rows)[f"val_{metric}"], rel=1e-6)
    assert len(found) == 3 * len(METRICS)
    tested = quiet_trainer(strategy="fastft").test(module, data, verbose=False)
    assert [result["test_loss"] for result in tested] == [pytest.approx(found["val_loss"], rel=1e-6)] * 2
    assert tested[1]["test_loss/chat.de"] == pytest.approx(found["val_loss/chat.de"], rel=1e-6)


def test_one_named_set_has_its_name_too(tmp_path):
    _, trainer, _ = train(tmp_path, max_epochs=1, val_paths={"math": SETS["math"]})
    assert read_metrics(trainer)["val_loss/math"] == read_metrics(trainer)["val_loss"]


def test_two_ranks_find_the_metrics_of_one(tmp_path):
    _, trainer, _ = train(tmp_path)
    run_two_ranks("tests.training.named_sets_worker", tmp_path)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert first == second
    assert first == pytest.approx(read_metrics(trainer), rel=1e-5)


def test_means_of_other_tuners_weigh_sets_by_examples():
    sets = {"many": digit_rows(17, seed=1), "few": digit_rows(3, seed=2)}
    module = make(PreferenceTuner, loss="simpo")

    def run(val_paths):
        data = make_tuner_data(None, val_paths=val_paths, max_tokens=24)
        return quiet_trainer(strategy=FastFTStrategy()).validate(module, data, verbose=False)

    many, few = run(sets)
    (joined,) = run([row for rows in sets.values() for row in rows])
    assert many["val_loss/many"] != pytest.approx(few["val_loss/few"], rel=1e-3)
    for name, value in joined.items():
        assert many[name] == few[name] == pytest.approx(value, rel=1e-5)
        assert few[f"{name}/few"] == pytest.approx(run(sets["few"])[0][name], rel=1e-5)


def test_checkpoints_follow_all_sets_or_one_and_a_run_resumes(tmp_path):
    def save(monitor, folder):
        return ModelCheckpoint(monitor=monitor, dirpath=tmp_path / folder, filename="{epoch}", save_top_k=-1)

    callbacks = [save("val_loss", "all"), save("val_loss/math", "math"), EarlyStopping("val_loss/chat.de", patience=9)]
    _, trainer, _ = train(tmp_path, callbacks=callbacks)
    for callback, monitor in zip(callbacks, ("val_loss", "val_loss/math")):
        assert float(callback.best_model_score) == float(trainer.callback_metrics[monitor])
    resumed = train(tmp_path, ckpt_path=str(tmp_path / "all/epoch=0.ckpt"))[1]
    assert read_metrics(resumed) == read_metrics(trainer)
    with pytest.raises(OptionError, match="'val_loss/math'"):
        train(tmp_path, callbacks=[save("val_loss/mat", "wrong")])


def test_report_draws_the_loss_of_each_name_with_that_of_training(tmp_path):
    page = tmp_path / "report.html"
    train(tmp_path, max_epochs=1, callbacks=[RunReport(str(page))])
    text = page.read_text()
    assert set(re.findall("lowest ([^<]*) <", text)) == {"validation", "validation math", "validation chat.de"}
    assert not re.search("<h2>val_loss", text)


def test_splits_of_a_dataset_dict_are_named_sets():
    splits = datasets.DatasetDict({name: datasets.Dataset.from_list(rows) for name, rows in SETS.items()})
    module = tuner("lora")

    def run(val_paths):
        data = make_data(rows=None, val_paths=val_paths)
        return quiet_trainer(strategy="fastft").validate(module, data, verbose=False)

    found = run(splits)
    assert found == run(SETS)
    assert [f"val_loss/{name}" in part for name, part in zip(SETS, found, strict=True)] == [True, True]


class Numbers(Callback):
    """Keep the numbers of the examples of each pack of each loader."""

    def __init__(self):
        self.found = [[], []]

    def on_predict_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx=0):
        self.found[dataloader_idx].append(list(batch.numbers))


def predict(module, rows):
    """Predictions, and the numbers of the examples of each loader."""
    seen = Numbers()
    trainer = quiet_trainer(strategy="fastft", callbacks=[seen])
    return trainer.predict(module, make_tuner_data(None, predict_paths=rows, max_tokens=64)), seen.found


# KTO adds a completion of another example in training and validation.
@pytest.mark.parametrize("loss", [None, "kto"])
def test_predictions_of_named_sets_are_those_of_each_alone(loss):
    if loss is None:
        module, sets = tuner("lora"), SETS
    else:
        module = make(PreferenceTuner, loss=loss, reference="adapters_off", lora={"r": 2})
        sets = {"many": digit_rows(17, seed=1, kind="label"), "few": digit_rows(3, seed=2, kind="label")}
    found, numbers = predict(module, sets)
    assert len(found) == 2
    for index, rows in enumerate(sets.values()):
        alone, (numbers_alone, _) = predict(module, rows)
        assert numbers[index] == numbers_alone
        assert sorted(chain.from_iterable(numbers_alone)) == list(range(len(rows)))
        assert all(torch.equal(one, two) for one, two in zip(found[index], alone, strict=True))


def test_an_interrupted_validation_leaves_no_sums():
    module, data = tuner("lora"), make_data(rows=None, val_paths=SETS)

    def run(**options):
        return quiet_trainer(strategy="fastft", **options).validate(module, data, verbose=False)[0]

    expected, whole = run(), module.validation_step
    module.validation_step = lambda batch, batch_idx, dataloader_idx=0: (
        whole(batch, batch_idx, dataloader_idx),
        (_ for _ in ()).throw(ValueError("stop")),
    )
    with pytest.raises(ValueError, match="stop"):
        run()
    del module.validation_step
    assert run() == expected


def test_lightning_modules_of_ones_own_get_a_loader_for_each_name():
    class Own(TinyModel):
        def validation_step(self, batch, batch_idx, dataloader_idx):
            self.seen.append((dataloader_idx, rows_in(batch)))

    model = Own()
    assert isinstance(model, LightningModule)
    sets = {"a": make_numbered_rows(20, seed=1), "b": make_numbered_rows(7, seed=2)}
    quiet_trainer().validate(model, make_data(rows=None, val_paths=sets), verbose=False)
    for number, rows in enumerate(sets.values()):
        found = [row for seen, rows_of in model.seen if seen == number for row in rows_of]
        assert sorted(found) == list(range(len(rows)))


def test_description_has_examples_and_packs_of_each_name(tmp_path):
    path = tmp_path / "b.jsonl"
    path.write_text('{"input_ids": [1, 2, 3]}\n' * 5)
    data = make_data(val_paths={"a": make_numbered_rows(9), "b": [str(path), str(path)]})
    data.setup("fit")
    text = describe_data(data)
    assert "19 examples" in text
    assert "  b: 10 examples, 30 tokens, 20 trained; 1 pack" in text
    assert "b 1 pack}" in str(data)
    # Each rank has a pack of each set.
    page = render_data_page(data, rejects={}, world_size=2)
    assert "b: 10 examples, 30 tokens, 20 trained; 2 packs" in page
    assert "2 ranks get equal numbers" not in page
    assert len(data.packs("val")) == sum(len(loader) for loader in data.val_dataloader().values())


@pytest.mark.parametrize(
    ("sets", "error", "message"),
    [
        ({"a.jsonl": 0.5}, OptionError, "only paths takes weights"),
        ({"a": None}, OptionError, "'a' to None"),
        ({}, OptionError, "empty mapping"),
        ({"a/b": "a.jsonl"}, OptionError, "names a data set 'a/b'"),
        ({3: "a.jsonl"}, OptionError, "names a data set 3"),
        ({"a": 7.5j}, OptionError, r"val_paths\['a'\]"),
        ({"good": [{"input_ids": [1, 2, 3]}] * 9, "bad": [{"input_ids": [1]}]}, DataError, "'bad' holds no usable"),
    ],
)
def test_sets_that_cannot_be_are_refused(sets, error, message):
    with pytest.raises(error, match=message):
        make_data(val_paths=sets, max_reject_share=0.5).setup("fit")
