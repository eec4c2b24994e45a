"""The command line's Trainer leaves a checkpoint of the last step, wherever the last validation was."""

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_fastft import ExactResume
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


@pytest.mark.filterwarnings("ignore:Resumed with another setting")
@pytest.mark.parametrize("is_saved_at_end", [False, True])
@pytest.mark.parametrize("end", [{"max_steps": 9}, {"max_steps": -1, "max_epochs": 2}])
def test_a_run_that_a_limit_ended_inside_an_epoch_goes_on_with_the_rest_of_it(tmp_path, end, is_saved_at_end):
    """Also where the limit is another one: Lightning would go on with the next epoch."""
    options = NEVER if is_saved_at_end else {"limit_val_batches": 0}
    whole, _ = fit(tmp_path / "whole", **end, **options)
    _, found = fit(tmp_path / "first", max_steps=3, callbacks=[WritesWeights(), ExactResume()], **options)
    last = tmp_path / "first" / found[0]
    resumed, _ = fit(tmp_path / "resumed", ckpt_path=last, callbacks=[ExactResume()], **end, **options)
    assert found == ["checkpoints/epoch=0-step=3.ckpt"]
    assert resumed.seen == whole.seen[3:]
    assert torch.equal(resumed.weight, whole.weight)
    _, again = fit(tmp_path / "again", max_steps=3, ckpt_path=last, **options)
    assert again == []
