"""A run says how many optimizer steps it has, warns where the data makes few, and answers checkpoints at or past
its end.
"""

import logging
import warnings

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

import lightning_fastft.cli.run_length as run_length
from lightning_fastft import FineTuner
from lightning_fastft.cli.run_length import RunLength, check_has_end
from lightning_fastft.core.errors import OptionError, ResumeError
from tests.support.datamodule_worker import TinyModel, make_data

QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


@pytest.fixture
def told(monkeypatch):
    """What the callback says: lines, and warnings."""
    heard = {"info": [], "warning": []}
    monkeypatch.setattr(run_length, "rank_zero_info", heard["info"].append)
    monkeypatch.setattr(run_length, "rank_zero_warn", heard["warning"].append)
    return heard


def fit(*, ckpt_path=None, callbacks=(), data=None, **options):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="lightning")
        trainer = Trainer(**{**QUIET, **options}, callbacks=[RunLength(), *callbacks])
        trainer.fit(TinyModel(), data or make_data(), ckpt_path=ckpt_path)
    return trainer


# make_data() has 14 packs of 64 tokens, 13 of them packed.
@pytest.mark.parametrize(
    ("options", "num_steps"),
    [
        ({"max_epochs": 1}, None),
        ({"max_epochs": 1, "accumulate_grad_batches": 7}, 2),
        ({"max_epochs": 4, "accumulate_grad_batches": 7}, 8),
        ({"max_epochs": 5, "accumulate_grad_batches": 7}, None),
        # Whoever says how many steps or batches there are to be knows.
        ({"max_epochs": 1, "limit_train_batches": 2}, None),
        ({"max_epochs": 1, "accumulate_grad_batches": 7, "max_steps": 1}, None),
        ({"max_steps": 1}, None),
        ({"max_epochs": 1, "accumulate_grad_batches": 7, "max_steps": 50}, 2),
    ],
)
def test_few_optimizer_steps_are_warned_of_once_with_what_to_do(told, options, num_steps):
    trainer = fit(**options)
    assert len(told["info"]) == 1
    accumulate = options.get("accumulate_grad_batches", 1)
    steps = 14 // accumulate
    assert f"in {steps} optimizer steps of {accumulate} pack" in told["info"][0]
    assert ("limit_train_batches leaves 2" in told["info"][0]) == ("limit_train_batches" in options)
    if num_steps is None:
        assert told["warning"] == []
        return
    assert trainer.global_step == num_steps
    assert len(told["warning"]) == 1
    for words in (
        f"{num_steps} optimizer steps",
        "14 packs of max_tokens=64",
        "accumulate_grad_batches=7",
        "--data.max_tokens",
        "--trainer.max_epochs",
    ):
        assert words in told["warning"][0]
    assert "--trainer.accumulate_grad_batches 1" in told["warning"][0]


@pytest.mark.parametrize(("command", "option"), [("validate", "--data.val_paths"), ("test", "--data.test_paths")])
def test_an_evaluation_without_data_is_refused(command, option):
    class Evaluated(TinyModel):
        validation_step = test_step = TinyModel.training_step

    trainer = Trainer(**QUIET, callbacks=[RunLength()])
    with pytest.raises(OptionError, match=option):
        getattr(trainer, command)(Evaluated(), make_data())


def test_checkpoint_past_the_last_epoch_is_refused_with_what_to_do(told, tmp_path):
    path = tmp_path / "last.ckpt"
    fit(max_epochs=3).save_checkpoint(path)
    with pytest.raises(
        ResumeError,
        match=r"last\.ckpt has 3 epochs behind it and this run ends after 2 .* --trainer.max_epochs 4 or more",
    ):
        fit(max_epochs=2, ckpt_path=path)
    assert fit(max_epochs=4, ckpt_path=path).current_epoch == 4
    assert fit(max_epochs=-1, max_steps=43, ckpt_path=path).global_step == 43


@pytest.mark.parametrize(
    ("options", "place"),
    [
        (
            {"max_epochs": 2},
            "epoch 2 of max_epochs=2, optimizer step 28). To continue, give a higher --trainer.max_epochs.",
        ),
        (
            {"max_epochs": -1, "max_steps": 28},
            "optimizer step 28 of max_steps=28). To continue, give a higher --trainer.max_steps.",
        ),
    ],
)
def test_resumed_run_that_is_at_its_end_says_so(told, tmp_path, options, place):
    saver = ModelCheckpoint(dirpath=tmp_path, save_last=True)
    fit(**options, callbacks=[saver], enable_checkpointing=True)
    told["info"].clear()
    fit(**options, ckpt_path=tmp_path / "last.ckpt")
    assert len(told["info"]) == 2
    assert told["info"][1].startswith("Nothing was left to train: ")
    assert told["info"][1].endswith(place)
    told["info"].clear()
    fit(max_epochs=3, ckpt_path=tmp_path / "last.ckpt")
    assert len(told["info"]) == 1, "a run that goes on says nothing of its end"


def test_other_data_is_left_alone(told):
    class Plain(LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)

        def training_step(self, batch, batch_idx):
            return self.layer(batch).sum()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    trainer = Trainer(**QUIET, max_epochs=1, callbacks=[RunLength()])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(Plain(), torch.utils.data.DataLoader(torch.ones(2, 2)))
    assert told == {"info": [], "warning": []}


@pytest.mark.slow
@pytest.mark.filterwarnings("default:The whole run has:UserWarning")
def test_command_line_tells_steps_and_answers_checkpoints(folder, demo_files, answer, caplog):
    caplog.set_level(logging.INFO, logger="lightning.pytorch")
    tuner = FineTuner(str(demo_files.model), init="random", dtype="float32")
    tuner.configure_model()
    tuner.save_pretrained("model")
    words = [
        "--model.model",
        "model",
        "--model.dtype",
        "float32",
        "--model.lora.r",
        "4",
        "--data.paths",
        str(demo_files.train),
    ]
    words += [
        "--data.max_tokens",
        "1024",
        "--data.cache_dir",
        "null",
        "--data.num_workers",
        "0",
        "--data.num_proc",
        "1",
    ]
    words += ["--trainer.accelerator", "cpu", "--trainer.devices", "1", "--trainer.accumulate_grad_batches", "4"]
    words += ["--trainer.logger", "false", "--trainer.default_root_dir", "out"]
    saving = [
        "--trainer.callbacks+=ModelCheckpoint",
        "--trainer.callbacks.dirpath",
        "out",
        "--trainer.callbacks.save_last",
        "true",
    ]
    with pytest.warns(UserWarning, match="The whole run has 3 optimizer steps"):
        assert answer(["fit", *words, "--trainer.max_epochs", "3", *saving])[0] == 0
    resumed = [*words, "--trainer.enable_progress_bar", "false", "--ckpt_path", "out/last.ckpt"]
    status, text = answer(["fit", *resumed, "--trainer.max_epochs", "1"])
    assert status == 1
    assert "error: ResumeError: The checkpoint out/last.ckpt has 3 epochs behind it and this run ends after 1" in text
    assert "Traceback" not in text
    assert answer(["fit", *resumed, "--trainer.max_epochs", "3"])[0] == 0
    assert "Nothing was left to train: out/last.ckpt" in caplog.text


@pytest.mark.parametrize(
    "options", [{}, {"max_epochs": None, "max_steps": -1, "max_time": None, "fast_dev_run": False}]
)
def test_a_run_without_an_end_is_refused(options):
    with pytest.raises(OptionError, match="no end"):
        check_has_end(options)


@pytest.mark.parametrize(
    "options",
    [
        {"max_epochs": 0},
        {"max_epochs": 1, "max_steps": 0},
        *({"max_steps": 5, "limit_train_batches": n} for n in (0, 0.0)),
    ],
)
def test_a_run_that_trains_nothing_is_refused_by_the_option_that_says_so(options):
    with pytest.raises(OptionError, match=rf"{[*options][-1]} is 0.*nothing would be trained"):
        check_has_end({"max_epochs": None, "max_steps": -1, **options})
    check_has_end({"max_steps": -1, **options, "fast_dev_run": 1})


@pytest.mark.parametrize(
    "options",
    [{"max_epochs": 1}, {"max_epochs": -1}, {"max_steps": 5}, {"max_time": "00:01:00:00"}, {"fast_dev_run": 2}],
)
def test_a_run_with_one_of_the_ends_is_not_refused(options):
    check_has_end({"max_epochs": None, "max_steps": -1, "max_time": None, "fast_dev_run": False, **options})
