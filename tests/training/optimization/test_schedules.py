"""Parameter groups hold everything once; schedules rise to the peak and end where they should, also to a peak that
Lightning's LearningRateFinder left in the tuner.
"""

import functools
import itertools

import pytest
import torch
from lightning.pytorch.callbacks import Callback, LearningRateFinder

from lightning_fastft.core.errors import OptionError
from lightning_fastft.training.optimization.schedules import SCHEDULES, group_parameters, learning_rate_schedule
from tests.support.fine_tuners import fit, trainable, tuner


@pytest.mark.parametrize("weight_decay", [None, 0.0, 0.1])
@pytest.mark.parametrize("learning_rate", [None, 0.5])
def test_groups_hold_each_parameter_once_with_the_options_given(learning_rate, weight_decay):
    parameters = [torch.nn.Parameter(torch.ones(shape)) for shape in ((), (3,), (2, 2), (1, 4), (2, 3, 4))]
    groups = group_parameters(parameters, learning_rate=learning_rate, weight_decay=weight_decay)
    assert sorted(id(parameter) for group in groups for parameter in group["params"]) == sorted(
        id(parameter) for parameter in parameters
    )
    for group in groups:
        assert group.get("lr") == learning_rate
        if weight_decay is not None:
            assert {parameter.ndim > 1 for parameter in group["params"]} == {
                group["weight_decay"] == weight_decay
            } or weight_decay == 0.0
        else:
            assert "weight_decay" not in group


def test_groups_are_never_empty():
    matrix, vector = torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(2))
    for parameter in (matrix, vector):
        groups = group_parameters([parameter], weight_decay=0.1)
        assert len(groups) == 1
        torch.optim.AdamW(groups)


@pytest.mark.covering
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("num_warmup_steps", [0, 1, 7, 100])
@pytest.mark.parametrize("num_steps", [0, 1, 50])
@pytest.mark.parametrize("end_share", [0.0, 0.1, 1.0])
def test_schedule_is_never_0_before_the_end_and_falls_to_its_end(name, num_steps, num_warmup_steps, end_share):
    share = learning_rate_schedule(name, num_steps=num_steps, num_warmup_steps=num_warmup_steps, end_share=end_share)
    values = [share(step) for step in range(max(num_steps, num_warmup_steps) + 3)]
    assert all(0 <= value <= 1 for value in values)
    assert all(value > 0 for value in values[:num_steps])
    assert all(before <= after for before, after in itertools.pairwise(values[:num_warmup_steps]))
    assert all(before >= after for before, after in itertools.pairwise(values[num_warmup_steps:]))
    assert num_warmup_steps == 0 or values[num_warmup_steps - 1] == 1.0
    assert values[-1] == pytest.approx(1.0 if name == "constant" else end_share)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("num_warmup_steps", [0, 1, 3, 9])
def test_schedule_is_that_of_transformers_without_a_step_of_rate_0(name, num_warmup_steps):
    from transformers import get_scheduler

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    kind = "constant_with_warmup" if name == "constant" else name
    first = int(num_warmup_steps > 0)
    theirs = get_scheduler(
        kind, optimizer, num_warmup_steps=num_warmup_steps, num_training_steps=12 + first
    ).lr_lambdas[0]
    share = learning_rate_schedule(name, num_steps=12, num_warmup_steps=num_warmup_steps)
    values = [share(step) for step in range(13)]
    assert values == pytest.approx([theirs(step + first) for step in range(13)], abs=1e-12)
    assert name == "constant" or values.count(1.0) == 1


@pytest.mark.parametrize("num_warmup_steps", [1, 3])
def test_schedule_never_exceeds_its_peak_between_two_steps(num_warmup_steps):
    # Where steps change their size, a resumed run is between two steps of the schedule.
    share = learning_rate_schedule("cosine", num_steps=12, num_warmup_steps=num_warmup_steps)
    assert max(share(tenth / 10) for tenth in range(120)) == 1.0


def test_unknown_schedule_is_refused():
    with pytest.raises(OptionError, match="cosine"):
        learning_rate_schedule("cosin", num_steps=1, num_warmup_steps=0)


FOUND = 0.03


class Finder(LearningRateFinder):
    """Finds a known rate."""

    def lr_find(self, trainer, pl_module):
        super().lr_find(trainer, pl_module)
        pl_module.learning_rate = FOUND
        for group in trainer.optimizers[0].param_groups:
            group["lr"] = FOUND


class Rates(Callback):
    def __init__(self):
        self.of_steps = []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.of_steps.append([group["lr"] for group in optimizer.param_groups])


def run(folder, *callbacks, **options):
    rates = Rates()
    torch.manual_seed(0)
    module = tuner(**options)
    fit(module, folder, num_batches=8, callbacks=[*callbacks, rates])
    return rates.of_steps, trainable(module)


def watching_the_loss(optimizer):
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    scheduler.monitor = "train_loss"
    return scheduler


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "full"},
        {"warmup_steps": 3},
        {"loraplus_lr_ratio": 4.0},
        {"loraplus_lr_ratio": 4.0, "learning_rate": None},
        {"loraplus_lr_ratio": 4.0, "scheduler": watching_the_loss},
    ],
    ids=["full", "warm-up", "lora+", "default rate", "plateau"],
)
def test_every_step_has_the_rate_that_was_found(tmp_path, options):
    found, weights = run(tmp_path, Finder(num_training_steps=3), **options)
    expected, others = run(tmp_path, **{**options, "learning_rate": FOUND})
    assert found == [pytest.approx(rates) for rates in expected]
    assert all(torch.allclose(weights[name], others[name], atol=1e-6) for name in others)


def test_schedule_that_keeps_its_rate_is_refused_and_runs_without_the_update(tmp_path):
    options = {"scheduler": functools.partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=0.01, total_steps=8)}
    with pytest.raises(OptionError, match="update_attr"):
        run(tmp_path, Finder(num_training_steps=3), **options)
    finder = LearningRateFinder(num_training_steps=3, update_attr=False)
    assert run(tmp_path, finder, **options)[0] == run(tmp_path, **options)[0]
