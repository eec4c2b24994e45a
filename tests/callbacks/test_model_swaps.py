"""ModelSwaps: what callbacks that swap modules have in common."""

from lightning_fastft import BincountRouter, FusedKernels, PackedTraining
from lightning_fastft.callbacks.model_swaps import ModelSwaps
from lightning_fastft.core.given_once import GivenOnce
from lightning_fastft.strategies.registry import register_strategies
from tests.support.training_parts import PlainModule, packed_loader, quiet_trainer, tiny_llama

register_strategies()


def test_every_callback_that_swaps_modules_is_held_to_it():
    assert {FusedKernels, BincountRouter} <= set(ModelSwaps.__subclasses__())
    assert not [kind for kind in ModelSwaps.__subclasses__() if "setup" in vars(kind)]
    assert issubclass(ModelSwaps, GivenOnce)


def test_different_callbacks_that_swap_modules_go_together(tmp_path):
    trainer = quiet_trainer(
        tmp_path, strategy="auto", callbacks=[FusedKernels(), BincountRouter(), PackedTraining()], max_steps=1
    )
    trainer.fit(PlainModule(tiny_llama()), packed_loader())
    assert trainer.global_step == 1
