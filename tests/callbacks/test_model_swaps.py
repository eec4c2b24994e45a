"""ModelSwaps: what callbacks that swap modules have in common."""

import pytest

from lightning_fastft import BincountRouter, FusedKernels, PackedTraining
from lightning_fastft.callbacks.model_swaps import ModelSwaps
from lightning_fastft.core.errors import OptionError
from lightning_fastft.strategies.registry import register_strategies
from tests.support.training_parts import PlainModule, packed_loader, quiet_trainer, tiny_llama

register_strategies()


@pytest.mark.parametrize("kind", [FusedKernels, BincountRouter, PackedTraining])
@pytest.mark.parametrize("strategy", ["fastft", "auto"])
def test_a_callback_that_is_given_twice_is_refused_by_name(tmp_path, kind, strategy):
    module = PlainModule(tiny_llama())
    trainer = quiet_trainer(tmp_path, strategy=strategy, callbacks=[kind(), kind()])
    with pytest.raises(OptionError, match=rf"^{kind.__name__} is given 2 times") as refused:
        trainer.fit(module, packed_loader())
    assert all(word in str(refused.value) for word in ("command line", "config", "init_args", "YAML"))
    assert trainer.global_step == 0


def test_every_callback_that_swaps_modules_is_held_to_it():
    assert {FusedKernels, BincountRouter} <= set(ModelSwaps.__subclasses__())
    assert not [kind for kind in ModelSwaps.__subclasses__() if "setup" in vars(kind)]


def test_different_callbacks_that_swap_modules_go_together(tmp_path):
    trainer = quiet_trainer(
        tmp_path, strategy="auto", callbacks=[FusedKernels(), BincountRouter(), PackedTraining()], max_steps=1
    )
    trainer.fit(PlainModule(tiny_llama()), packed_loader())
    assert trainer.global_step == 1
