"""Losses of steps: exact means over ranks, points alike on all of them, nothing changed where ranks noted
different steps.
"""

import math

import numpy as np
import pytest

from lightning_fastft.monitor.report.losses import NUM_ENDS, StepLosses


def noted(values):
    losses = StepLosses()
    for step, value in enumerate(values):
        losses.add(step, value, is_last=True)
    return losses


def mean_of(*ranks):
    """The losses of rank 0 after it has taken the mean, and whether it could."""
    return ranks[0], ranks[0].take_mean(np.stack([losses.to_array() for losses in ranks]))


@pytest.mark.parametrize("num_steps", [0, 1, 2, NUM_ENDS, NUM_ENDS + 1, 512, 513, 1500])
def test_mean_over_ranks_is_that_of_every_step(num_steps):
    values_RN = np.random.default_rng(0).normal(5, 1, size=(3, num_steps))
    losses, has_all = mean_of(*map(noted, values_RN.tolist()))
    truth = noted(values_RN.mean(axis=0).tolist())
    assert has_all
    assert losses.curve.values_per_point == truth.curve.values_per_point
    assert np.array(losses.curve.points()) == pytest.approx(np.array(truth.curve.points()))
    for num_ends in (1, NUM_ENDS):
        assert losses.first(num_ends) == pytest.approx(truth.first(num_ends))
        assert losses.final(num_ends) == pytest.approx(truth.final(num_ends))


def test_step_that_is_not_finite_on_one_rank_is_in_no_mean():
    losses, has_all = mean_of(noted([1.0, 2.0, 3.0, 4.0]), noted([3.0, math.nan, 5.0, math.inf]))
    assert has_all
    assert losses.curve.points() == [(0, 0, 2.0), (2, 2, 4.0)]
    assert (losses.first(1), losses.final(1), losses.num_not_finite) == (2.0, 4.0, 2)


@pytest.mark.parametrize("other", [[1.0, 2.0], [1.0, 2.0, 3.0, 4.0], []])
def test_ranks_with_different_steps_have_no_mean(other):
    losses, has_all = mean_of(noted([5.0, 6.0, 7.0]), noted(other))
    assert not has_all
    assert [value for *_, value in losses.curve.points()] == [5.0, 6.0, 7.0]
    assert (losses.first(NUM_ENDS), losses.final(1)) == (6.0, 7.0)


def test_ranks_hand_over_as_many_numbers_however_long_they_ran():
    assert len({len(noted([1.0] * num_steps).to_array()) for num_steps in (0, 1, 3000)}) == 1


def test_window_with_a_loss_that_is_not_finite_has_no_point():
    losses = StepLosses()
    for index, value in enumerate([1.0, float("nan"), 3.0, 5.0]):
        losses.add(index // 2, value, is_last=bool(index % 2))
    assert losses.curve.points() == [(1, 1, 4.0)]
    assert (losses.first(2), losses.num_not_finite) == (4.0, 1)


def test_a_step_whose_last_micro_batch_has_no_loss_is_in_no_other():
    losses = StepLosses()
    losses.add(0, 3.0, is_last=False, num_micro_batches=2)
    # training_step returned None for the last micro-batch of step 0.
    losses.add(1, 5.0, is_last=False, num_micro_batches=2)
    losses.add(1, 7.0, is_last=True, num_micro_batches=2)
    assert losses.curve.points() == [(1, 1, 6.0)]
