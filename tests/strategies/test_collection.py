"""Garbage is collected behind each optimizer step, not in it, and as before once the run has ended."""

import gc
import weakref

import lightning.pytorch as pl
import pytest

from lightning_fastft.strategies.single_device import FastFTStrategy
from tests.support.tiny_models import build_tiny
from tests.support.training_parts import PlainModule, packed_loader, quiet_trainer


class Cycle:
    """Garbage that only a collection frees."""

    def __init__(self):
        self.itself = self


class Watch(pl.Callback):
    """Count the collections of each step between its start and its optimizer, and the cycles that outlive it."""

    def __init__(self, *, fails_at=None):
        self.fails_at = fails_at
        self.num_inside, self.num_alive = [], []
        self.is_inside = False
        self.cycles = []

    def note(self, phase, info):
        if phase == "start" and self.is_inside:
            self.num_inside[-1] += 1

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.num_inside.append(0)
        self.is_inside = True
        cycle = Cycle()
        self.cycles.append(weakref.ref(cycle))

    def on_before_optimizer_step(self, trainer, module, optimizer):
        if self.fails_at == len(self.num_inside):
            raise ValueError("planted")
        # More than the 700 objects after which Python collects.
        assert len([[] for _ in range(2000)]) == 2000
        self.is_inside = False

    def on_train_batch_end(self, trainer, *_):
        self.num_alive.append(sum(cycle() is not None for cycle in self.cycles))


def fit(watch, **options):
    module = PlainModule(build_tiny("llama"))
    gc.callbacks.append(watch.note)
    try:
        quiet_trainer(strategy=FastFTStrategy(), callbacks=[watch], **options).fit(module, packed_loader(4))
    finally:
        gc.callbacks.remove(watch.note)


def test_steps_collect_nothing_but_behind_the_optimizer():
    before, watch = gc.get_threshold(), Watch()
    fit(watch, max_steps=4)
    assert watch.num_inside == [0] * 4
    assert watch.num_alive == [0] * 4
    assert gc.get_threshold() == before


def test_garbage_of_micro_batches_is_collected_with_their_step():
    watch = Watch()
    fit(watch, max_steps=2, accumulate_grad_batches=2)
    assert watch.num_alive == [1, 0, 1, 0]


def test_a_failed_run_restores_the_thresholds():
    before = gc.get_threshold()
    with pytest.raises(ValueError, match="planted"):
        fit(Watch(fails_at=2), max_steps=4)
    assert gc.get_threshold() == before


@pytest.mark.parametrize("thresholds", [None, (0, 10, 10), (60_000, 10, 10)])
def test_settings_of_the_user_stay(thresholds):
    before, watch = gc.get_threshold(), Watch()
    try:
        gc.disable() if thresholds is None else gc.set_threshold(*thresholds)
        wanted = gc.isenabled(), gc.get_threshold()
        fit(watch, max_steps=2)
        assert (gc.isenabled(), gc.get_threshold()) == wanted
        assert watch.num_alive == [1, 2]
    finally:
        gc.enable()
        gc.set_threshold(*before)
