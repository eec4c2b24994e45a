"""Checkpoints of manual optimization with accumulated gradients, which no checkpoint keeps: the run says so."""

import warnings

import pytest

from tests.support.training_parts import PlainModule, SaveAtStep, packed_loader, quiet_trainer, tiny_llama


class StepsByHand(PlainModule):
    """Sums the gradients of some micro-batches before it steps."""

    automatic_optimization = False

    def __init__(self, num_summed, *, clears_first=False):
        super().__init__(tiny_llama())
        self.num_summed, self.clears_first = num_summed, clears_first

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        if self.clears_first and batch_idx % self.num_summed == 0:
            optimizer.zero_grad()
        self.manual_backward(self.model(**batch).loss / self.num_summed)
        if (batch_idx + 1) % self.num_summed == 0:
            optimizer.step()
            if not self.clears_first:
                optimizer.zero_grad()


class SaveAtBatch(SaveAtStep):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == self.step:
            trainer.save_checkpoint(self.path)


@pytest.mark.parametrize(
    ("num_summed", "clears_first", "batch_idx", "is_said"),
    [(3, False, 3, True), (3, False, 4, True), (3, True, 4, True), (3, False, 5, False), (3, True, 5, False)]
    + [(1, clears_first, 2, False) for clears_first in (False, True)],
)
def test_a_save_between_two_steps_is_warned_about(tmp_path, num_summed, clears_first, batch_idx, is_said):
    module = StepsByHand(num_summed, clears_first=clears_first)
    save = SaveAtBatch(batch_idx, tmp_path / "a.ckpt")
    trainer = quiet_trainer(tmp_path, strategy="fastft", max_steps=-1, max_epochs=2, callbacks=[save])
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        trainer.fit(module, packed_loader(6))
    assert sum("Accumulated gradients are not saved" in str(each.message) for each in found) == is_said
