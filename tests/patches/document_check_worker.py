"""Rank of test_document_check: a fit with a family outside the tested list, exact and with a planted leak."""

import sys

import lightning.pytorch as pl
import torch

from lightning_fastft.core.errors import UnsupportedModelError
from lightning_fastft.strategies.registry import register_strategies
from lightning_fastft.training.fine_tuner import FineTuner
from tests.support.packs import make_batch
from tests.support.tiny_models import build_tiny
from tests.support.training_parts import quiet_trainer


class Tuner(FineTuner):
    """Built in configure_model, as sharding strategies want it, with a leak or without."""

    def __init__(self, *, is_leaky):
        super().__init__(build_tiny("gemma").config, init="random", dtype="float32", warmup_share=0.0)
        self.is_leaky = is_leaky

    def configure_model(self):
        was_built = self._is_built
        super().configure_model()
        if self.is_leaky and not was_built:
            self.model.model.layers[0].input_layernorm.register_forward_pre_hook(
                lambda module, args: (args[0] + 0.5 * args[0].roll(1, dims=1),)
            )


def main(strategy):
    """Fit twice under a strategy, on this rank."""
    register_strategies()
    for is_leaky in (False, True):
        trainer = quiet_trainer(devices=2, strategy=strategy, max_steps=1, use_distributed_sampler=False)
        pl.seed_everything(1)
        tuner, loader = Tuner(is_leaky=is_leaky), torch.utils.data.DataLoader([make_batch()], batch_size=None)
        try:
            trainer.fit(tuner, loader)
        except UnsupportedModelError as error:
            assert is_leaky and "(gemma) gives other logits" in str(error), error  # noqa: PT018, PT017
        else:
            assert not is_leaky
            assert trainer.global_step == 1
            assert any(status.name == "check of documents" for status in trainer.strategy.packed_steps.statuses())


if __name__ == "__main__":
    main(sys.argv[1])
