"""The command line's Trainer leaves a checkpoint of the last step, wherever the last validation was."""

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_fastft.cli.trainer import FastFTTrainer
from tests.support.datamodule_worker import TinyModel, make_data

NEVER = {"check_val_every_n_epoch": None, "val_check_interval": 100}


class WritesWeights(Callback):
    """As WeightAveraging does: at the end the weights of the module are replaced."""

    def on_train_end(self, trainer, pl_module):
        with torch.no_grad():
            pl_module.weight.zero_()


def fit(folder, *, saver=None, callbacks=(), ckpt_path=None, **options):
    callbacks = [*([] if saver is None else [ModelCheckpoint(dirpath=folder, **saver)]), *callbacks]
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0}
    trainer = FastFTTrainer(
        accelerator="cpu", devices=1, default_root_dir=folder, callbacks=callbacks, **quiet, **options
    )
    model = TinyModel()
    trainer.fit(model, make_data(val_share=0.3), ckpt_path=ckpt_path)
    return model, sorted(str(path.relative_to(folder)) for path in folder.rglob("*.ckpt"))


@pytest.mark.parametrize(
    ("saver", "options", "saved"),
    [
        # Lightning's own ModelCheckpoint saves step 3, or nothing.
        (None, {"max_steps": 5, "val_check_interval": 3}, ["checkpoints/epoch=0-step=5.ckpt"]),
        (None, {"max_steps": 5, **NEVER}, ["checkpoints/epoch=0-step=5.ckpt"]),
        (None, {"max_epochs": 1, "limit_train_batches": 4, "check_val_every_n_epoch": 2}, None),
        ({"every_n_train_steps": 3, "save_last": True}, {"max_steps": 5}, ["epoch=0-step=5.ckpt", "last.ckpt"]),
        # The best values of a metric stay, and last.ckpt is the last step.
        ({"monitor": "val_loss"}, {"max_steps": 5, "val_check_interval": 3}, ["epoch=0-step=3.ckpt"]),
        (
            {"monitor": "val_loss", "save_last": True},
            {"max_steps": 5, "val_check_interval": 3},
            ["epoch=0-step=3.ckpt", "last.ckpt"],
        ),
        (None, {"fast_dev_run": 2}, []),
        (None, {"max_steps": 2, "enable_checkpointing": False}, []),
    ],
)
def test_last_step_is_saved(tmp_path, saver, options, saved):
    model, found = fit(tmp_path, saver=saver, **options)
    assert found == (["checkpoints/epoch=0-step=4.ckpt"] if saved is None else saved)
    if found and found[-1] != "epoch=0-step=3.ckpt":
        last = torch.load(tmp_path / found[-1], weights_only=True)
        assert last["global_step"] == model.trainer.global_step
        assert torch.equal(last["state_dict"]["weight"], model.weight)


def test_last_step_is_saved_with_the_weights_of_training_and_resumed_from(tmp_path):
    whole, _ = fit(tmp_path / "whole", max_steps=9, **NEVER)
    _, found = fit(tmp_path / "first", max_steps=5, callbacks=[WritesWeights()], **NEVER)
    last = tmp_path / "first" / found[0]
    resumed, _ = fit(tmp_path / "resumed", max_steps=9, ckpt_path=last, **NEVER)
    assert len(resumed.seen) == 4
    assert torch.equal(resumed.weight, whole.weight)
    _, again = fit(tmp_path / "again", max_steps=5, ckpt_path=last, **NEVER)
    assert again == []
