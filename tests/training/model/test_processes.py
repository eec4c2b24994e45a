"""Processes that end with the run would take the trained model with them."""

import pytest
from lightning.pytorch.trainer.states import TrainerFn

from lightning_fastft.core.errors import OptionError
from lightning_fastft.strategies.ddp import FastFTDDPStrategy
from tests.support.fine_tuners import tuner
from tests.support.training_parts import packed_loader, quiet_trainer


@pytest.mark.parametrize("strategy", ["ddp_spawn", "ddp_fork", "ddp_notebook"])
@pytest.mark.parametrize("kind", ["full", "lora"])
def test_a_model_that_ends_with_its_processes_is_not_trained(kind, strategy):
    made, trainer = tuner(kind), quiet_trainer(strategy=strategy)
    made.trainer, trainer.state.fn = trainer, TrainerFn.FITTING
    with pytest.raises(OptionError, match=r"start_method=.*is lost"):
        made.configure_model()


@pytest.mark.slow(seconds=5)
def test_processes_that_end_are_refused_in_a_run(tmp_path):
    strategy = FastFTDDPStrategy(start_method="fork")
    with pytest.raises(Exception, match=r"(?s)OptionError.*start_method='fork'"):
        quiet_trainer(tmp_path, strategy=strategy, max_steps=1).fit(tuner("lora"), packed_loader())


def test_a_model_that_is_only_read_may_end_with_its_processes():
    made, trainer = tuner("full"), quiet_trainer(strategy="ddp_spawn")
    made.trainer, trainer.state.fn = trainer, TrainerFn.VALIDATING
    trainer.strategy.broadcast = lambda value: value
    made.configure_model()
    assert made.model is not None
