"""Rule zero: between the arrival of a batch and the end of its optimizer step nothing reads a value from the device."""

from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from peft import LoraConfig, get_peft_model

from lightning_fastft.activations.checkpointing import OffloadCheckpointing
from lightning_fastft.callbacks.gradient_health import GradientHealth
from lightning_fastft.callbacks.packed_training import PackedTraining
from lightning_fastft.core.async_reader import AsyncScalarReader
from lightning_fastft.monitor.progress_bar import FastFTProgressBar
from lightning_fastft.monitor.token_throughput import TokenThroughput
from lightning_fastft.strategies.single_device import FastFTStrategy
from tests.support.host_waits import CountSteps
from tests.support.training_parts import PlainModule, packed_loader, quiet_trainer, tiny_llama


class FusedModule(PlainModule):
    def configure_optimizers(self):
        # The plain loop of torch reads its step count, which lies on the CPU on a GPU run too.
        return torch.optim.AdamW(
            [parameter for parameter in self.parameters() if parameter.requires_grad], lr=1e-2, fused=True
        )


def fit_counted(tmp_path, module, *, strategy, callbacks, **options):
    counter = CountSteps()
    # What a GPU run would find in pinned memory is not there yet: reading it is the next steps' business.
    with mock.patch.object(AsyncScalarReader, "poll", return_value=[]):
        trainer = quiet_trainer(tmp_path, strategy=strategy, callbacks=[*callbacks, counter], **options)
        trainer.fit(module, packed_loader(4))
    assert counter.waits
    return counter.waits


@pytest.mark.covering
@pytest.mark.parametrize("policy", ["keep", "recompute"])
@pytest.mark.parametrize("is_adapted", [False, True])
def test_step_of_the_strategy_waits_for_nothing(tmp_path, policy, is_adapted):
    model = get_peft_model(tiny_llama(), LoraConfig(r=4, target_modules="all-linear")) if is_adapted else tiny_llama()
    strategy = FastFTStrategy(activations=OffloadCheckpointing(policy))
    callbacks = [GradientHealth(num_steps=20), TokenThroughput(log_every_n_steps=1)]
    for waits in fit_counted(tmp_path, FusedModule(model), strategy=strategy, callbacks=callbacks, accelerator="auto"):
        assert waits.total == 0, waits.origin


def test_step_under_the_callback_waits_for_nothing(tmp_path):
    for waits in fit_counted(
        tmp_path, FusedModule(tiny_llama()), strategy="auto", callbacks=[PackedTraining()], accumulate_grad_batches=2
    ):
        assert waits.total == 0, waits.origin


def test_progress_bar_waits_for_nothing(tmp_path):
    counter = CountSteps()
    with mock.patch.object(AsyncScalarReader, "poll", return_value=[]):
        trainer = pl.Trainer(
            default_root_dir=tmp_path,
            accelerator="cpu",
            devices=1,
            max_steps=3,
            logger=False,
            enable_checkpointing=False,
            enable_model_summary=False,
            callbacks=[PackedTraining(), FastFTProgressBar(), counter],
        )
        trainer.fit(FusedModule(tiny_llama()), packed_loader(4))
    assert [waits.total for waits in counter.waits] == [0, 0, 0]


def test_the_counter_sees_a_wait(tmp_path):
    class Reads(FusedModule):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            loss.item()
            return loss

    assert all(
        waits.total > 0
        for waits in fit_counted(
            tmp_path, Reads(tiny_llama()), strategy=FastFTStrategy(), callbacks=[], accelerator="auto"
        )
    )


@pytest.mark.gpu
@pytest.mark.parametrize("policy", ["keep", "recompute"])
def test_step_waits_for_nothing_on_a_gpu(tmp_path, policy):
    class Guarded(FusedModule):
        """From the second step on (the first compiles, allocates and creates metrics) every wait is an error."""

        def on_train_batch_start(self, batch, batch_idx):
            torch.cuda.set_sync_debug_mode("error" if batch_idx >= 1 else "default")

        def on_train_batch_end(self, outputs, batch, batch_idx):
            torch.cuda.set_sync_debug_mode("default")

    model = tiny_llama().to(torch.bfloat16)
    callbacks = [GradientHealth(num_steps=3), TokenThroughput(log_every_n_steps=2), FastFTProgressBar()]
    trainer = pl.Trainer(
        default_root_dir=tmp_path,
        accelerator="cuda",
        devices=1,
        strategy=FastFTStrategy(activations=OffloadCheckpointing(policy)),
        max_steps=8,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        callbacks=callbacks,
    )
    try:
        trainer.fit(Guarded(model), packed_loader(8))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert trainer.global_step == 8
