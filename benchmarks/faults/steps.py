"""R7: bad steps. The model, the data and the faults are those of tests/callbacks/test_finite_guard.py."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from benchmarks.faults import child
from benchmarks.faults.table import GOOD
from tests.callbacks.test_finite_guard import CASES, CLIPPING, NUM_PARTS, Net, Recorder, differing, train, window
from tests.support.training_parts import quiet_trainer


class DefaultNet(Net):
    """The same model with the optimizer that everybody writes."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW as it comes."""
        return torch.optim.AdamW(self.parameters(), lr=0.05)


def bad_steps(folder: Path, *, stack: str, num_trials: int) -> list[str]:
    """R7: one bad micro-batch in the third of five optimizer steps."""
    cases = CASES[:: max(1, len(CASES) // num_trials)][:num_trials]
    act = _train_ours if stack == "ours" else _train_default
    ends = [child.run(folder, partial(act, folder, case)) for case in cases]
    return ["process died" if end.answer is None else end.answer for end in ends]


def _windows(fault: str, position: int) -> list[Any]:
    return [window(0), window(1), window(9, fault=fault, position=position), window(2), window(3)]


def _train_ours(folder: Path, case: tuple[str, int, str, str]) -> str:
    fault, position, optimizer, clipping = case
    after, _, told, guard = train(folder, _windows(fault, position), optimizer=optimizer, clipping=clipping)
    return _judge(after, is_said=len(told) == 1 and guard.num_skipped == 1)


def _train_default(folder: Path, case: tuple[str, int, str, str]) -> str:
    fault, position, _, clipping = case
    recorder = Recorder()
    options: Any = CLIPPING[clipping]
    batches: Any = [batch for batches in _windows(fault, position) for batch in batches]
    trainer = quiet_trainer(
        folder, max_steps=len(batches) // NUM_PARTS, accumulate_grad_batches=NUM_PARTS, callbacks=[recorder], **options
    )
    trainer.fit(DefaultNet("default"), DataLoader(batches, batch_size=None))
    return _judge(recorder.after, is_said=True)


def _judge(after: list[dict[str, torch.Tensor]], *, is_said: bool) -> str:
    """Say what became of weights and moments in the bad step, and of the weights by the end."""
    weights = [value for name, value in after[-1].items() if not name[0].isdigit()]
    num_lost = sum(not bool(value.isfinite().all()) for value in weights)
    if num_lost:
        return f"with weights not finite ({'all' if num_lost == len(weights) else 'some'} tensors), exit code 0"
    if differing(after[2], after[3]):
        return "trained on with a loss that was not finite, exit code 0"
    return GOOD if is_said else "with the bad step not said"
