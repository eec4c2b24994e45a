"""A model stays on its device at the end of a run if the host has no room for it."""

import warnings
from unittest import mock

import pytest
import torch
from torch import nn

from lightning_fastft.hf.expert_nf4_tensor import quantise_stack
from lightning_fastft.strategies import move_to_host
from lightning_fastft.strategies.single_device import FastFTStrategy
from tests.support.training_parts import PlainModule, packed_loader, quiet_trainer, tiny_llama

WEIGHT_BYTES = 4 * 8 * 8


def _module():
    """A module on a device that is not the host, with a gradient; its move is counted."""
    module = nn.Linear(8, 8, bias=False, device="meta")
    module.weight.grad = torch.empty_like(module.weight)
    move = mock.Mock(return_value=module)
    module.cpu = move
    return module, move


@pytest.mark.parametrize(
    ("room", "num_local_ranks", "moves", "keeps_gradients"),
    [(2, 1, True, True), (1, 1, True, False), (0.5, 1, False, False), (2, 2, True, False), (1, 2, False, False)],
)
def test_only_what_fits_is_moved(room, num_local_ranks, moves, keeps_gradients):
    module, move = _module()
    # One byte more, for the rounding of the usable share.
    available = int(room * WEIGHT_BYTES / move_to_host._USABLE_SHARE) + num_local_ranks + 1
    with (
        mock.patch.object(move_to_host, "available_host_bytes", return_value=available),
        warnings.catch_warnings(record=True) as caught,
        move_to_host.moving_within_memory(module, num_local_ranks=num_local_ranks),
    ):
        warnings.simplefilter("always")
        assert module.cpu() is module
    assert move.called == moves
    assert (module.weight.grad is not None) == keeps_gradients
    assert any("stays on its device" in str(each.message) for each in caught) != moves
    assert module.cpu is move


def test_experts_in_nf4_count_as_what_they_hold():
    experts = quantise_stack(torch.empty(2, 64, 64, dtype=torch.bfloat16, device="meta"))
    assert 0 < move_to_host._device_bytes([experts]) == experts.held_bytes < experts.numel()


def test_the_end_of_a_run_asks_first():
    """Lightning moves the module in the teardown of the strategy."""
    asked = []
    module = PlainModule(tiny_llama())
    with mock.patch.object(move_to_host, "available_host_bytes", side_effect=lambda: asked.append(1) or 2**40):
        quiet_trainer(strategy=FastFTStrategy(), max_steps=1).fit(module, packed_loader())
    assert asked == [1]
    assert "cpu" not in vars(module)
