"""Hybrid sharding: two copies of the weights over two ranks each give the weights of one process."""

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_fastft.core.errors import OptionError
from lightning_fastft.strategies.fsdp2 import FastFTFSDPStrategy
from lightning_fastft.strategies.single_device import FastFTStrategy
from tests.strategies.hybrid_shard_worker import NUM_RANKS, NUM_STEPS, batches_of
from tests.strategies.strategy_worker import CLIP_NORM, difference, make_tuner, trained_state
from tests.support.training_parts import quiet_trainer
from tests.support.two_ranks import run_two_ranks


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hybrid")
    run_two_ranks("tests.strategies.hybrid_shard_worker", folder, num_ranks=NUM_RANKS)
    return torch.load(folder / "found.pt", weights_only=True)


def train_alone(kind, folder):
    torch.manual_seed(5)
    module = make_tuner(kind, optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01))
    trainer = quiet_trainer(
        folder,
        strategy=FastFTStrategy(),
        max_steps=NUM_STEPS,
        accumulate_grad_batches=NUM_RANKS,
        gradient_clip_val=CLIP_NORM,
    )
    trainer.fit(module, DataLoader(batches_of(None), batch_size=None))
    return trained_state(module)


@pytest.mark.fault
@pytest.mark.parametrize("kind", ["lora", "full"])
def test_two_copies_equal_one_process_with_four_times_the_accumulation(found, kind, tmp_path):
    # AdamW's steps are as long for small gradients, whose sums round differently.
    assert difference(found[kind, True, "whole"], train_alone(kind, tmp_path)) <= 1e-4


@pytest.mark.fault
@pytest.mark.parametrize("is_folder", [True, False])
@pytest.mark.parametrize("kind", ["lora", "full"])
def test_a_resumed_run_equals_the_uninterrupted_one(found, kind, is_folder):
    whole, resumed = (found[kind, is_folder, form] for form in ("whole", "resumed"))
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(value, resumed[name]) for name, value in whole.items())


@pytest.mark.fault
def test_status_names_the_copies(found):
    assert "2 copies, each over 2 devices" in found["lora", True, "status"]


@pytest.mark.parametrize(
    ("shard", "data", "message"),
    [(3, 4, "shard must be 1, 2 or 4"), (8, 4, "shard must be 1, 2 or 4"), (0, 4, "shard"), ("host", 4, "shard")],
)
def test_sizes_that_do_not_fit_are_refused(shard, data, message):
    with pytest.raises(OptionError, match=message):
        chosen(shard, data=data)


def chosen(shard, *, data):
    strategy = FastFTFSDPStrategy(shard=shard)
    strategy._choose_sizes(data)
    return strategy._num_shards()


@pytest.mark.parametrize(("shard", "expected"), [("auto", 8), (4, 4), (8, 8), (1, 1)])
def test_shard_sizes(shard, expected):
    assert chosen(shard, data=8) == expected
