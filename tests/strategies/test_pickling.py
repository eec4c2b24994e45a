"""Whoever pickles a run (loader workers that are spawned, torch.save(trainer)) gets a copy; the run itself goes on."""

import multiprocessing
import pickle

import lightning.pytorch as pl
import pytest
from torch.utils.data import DataLoader

import lightning_fastft
from lightning_fastft import FineTuner, OffloadCheckpointing
from lightning_fastft.packing.collate import collate
from lightning_fastft.strategies.single_device import FastFTStrategy
from tests.support.token_weighting_worker import CONFIG
from tests.support.training_parts import (
    VOCAB_SIZE,
    PlainModule,
    packed_loader,
    quiet_trainer,
    random_documents,
    tiny_llama,
)

CALLBACKS = (
    "Watchdog",
    "GradientHealth",
    "FusedKernels",
    "BincountRouter",
    "TokenThroughput",
    "RunReport",
)


class PickleTheTrainer(pl.Callback):
    def __init__(self):
        self.sizes = []

    def on_train_batch_end(self, trainer, *args):
        self.sizes.append(len(pickle.dumps(trainer)))
        self.copy = pickle.loads(pickle.dumps(trainer))


@pytest.mark.covering
@pytest.mark.parametrize("policy", ["auto", "keep", "recompute"])
@pytest.mark.parametrize("kind", ["own module", "FineTuner"])
def test_trainer_is_pickled_in_the_middle_of_fit(tmp_path, kind, policy):
    lora = {"r": 2, "target_modules": ["q_proj"]}
    module = (
        PlainModule(tiny_llama())
        if kind == "own module"
        else FineTuner({**CONFIG, "vocab_size": VOCAB_SIZE}, init="random", lora=lora)
    )
    pickler = PickleTheTrainer()
    callbacks = [pickler, *(getattr(lightning_fastft, name)() for name in CALLBACKS)]
    # The optimizer of the own module takes no flag.
    callbacks.append(lightning_fastft.FiniteGuard(unsupported="wait"))
    trainer = quiet_trainer(
        tmp_path, strategy=FastFTStrategy(activations=OffloadCheckpointing(policy)), callbacks=callbacks
    )
    trainer.fit(module, packed_loader(4))
    assert len(pickler.sizes) == trainer.global_step == 3
    assert pickler.copy.global_step == 3


class BoundCollate(pl.LightningDataModule):
    """Hands a method of its own to a loader with workers, as many do."""

    def __init__(self, method):
        super().__init__()
        self.method = method

    def collate(self, documents):
        return collate(documents)

    def train_dataloader(self):
        context = multiprocessing.get_context(self.method)
        return DataLoader(
            random_documents(6, seed=0),
            batch_size=2,
            collate_fn=self.collate,
            num_workers=1,
            multiprocessing_context=context,
        )


@pytest.mark.slow
# Both pickle alike; a worker of the second is a fork of a process that is loaded.
@pytest.mark.parametrize("method", [pytest.param("spawn", marks=pytest.mark.fault), "forkserver"])
def test_loader_workers_that_are_not_forked_get_a_bound_method(tmp_path, method):
    trainer = quiet_trainer(tmp_path, strategy="fastft", callbacks=[lightning_fastft.Watchdog()], max_steps=2)
    trainer.fit(PlainModule(tiny_llama()), datamodule=BoundCollate(method))
    assert trainer.global_step == 2
