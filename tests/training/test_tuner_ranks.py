"""Tuners' gradients are those of each example alone: packed, accumulated, over ranks, and with every part that replaces
attention, activations, layers and experts.
"""

import math

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_fastft.activations.checkpointing import OffloadCheckpointing
from lightning_fastft.callbacks.bincount_router import BincountRouter
from lightning_fastft.callbacks.fused_kernels import FusedKernels
from lightning_fastft.core.errors import UnsupportedModelError
from lightning_fastft.strategies.single_device import FastFTStrategy
from tests.support.tuner_ranks_worker import (
    ACCUMULATIONS,
    DENSE,
    KINDS,
    KTO,
    MIXTURE,
    NUM_EXAMPLES,
    cases,
    gradient,
    make_teacher,
    make_trainer,
    make_tuner,
    micro_batches,
)
from tests.support.two_ranks import run_two_ranks

# fp32 sums over 16 examples, in another order.
BOUND = 3e-6


def difference(found, truth):
    assert found.keys() == truth.keys()
    distance = sum(float((found[name].double() - truth[name].double()).square().sum()) for name in truth) ** 0.5
    return distance / sum(float(value.double().square().sum()) for value in truth.values()) ** 0.5


@pytest.fixture(scope="module")
def one_by_one():
    """Every example in a pack of its own, in which each completion has a copy of its prompt."""
    found = {kind: gradient(kind, micro_batches(kind, accumulate=NUM_EXAMPLES, shares_prompts=False)) for kind in KINDS}
    return {**found, KTO: gradient(KTO, micro_batches(KTO, accumulate=1, shares_prompts=False))}


@pytest.mark.covering
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("accumulate", ACCUMULATIONS)
def test_packed_examples_train_as_one_by_one(one_by_one, kind, accumulate):
    assert difference(gradient(kind, micro_batches(kind, accumulate=accumulate)), one_by_one[kind]) <= BOUND


PARTS = {
    "reference": lambda: {"strategy": FastFTStrategy(attention="reference")},
    "sdpa": lambda: {"strategy": FastFTStrategy(attention="sdpa")},
    "recompute": lambda: {"strategy": FastFTStrategy(activations=OffloadCheckpointing("recompute"))},
    "offload": lambda: {"strategy": FastFTStrategy(activations=OffloadCheckpointing("offload"))},
    "auto": lambda: {"strategy": FastFTStrategy(activations=OffloadCheckpointing("auto"))},
    "fused": lambda: {"callbacks": [FusedKernels()]},
    "fused, recompute": lambda: {
        "callbacks": [FusedKernels()], "strategy": FastFTStrategy(activations=OffloadCheckpointing("recompute")),
    },
}  # fmt: skip


@pytest.mark.covering
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("part", PARTS)
def test_every_part_trains_as_one_by_one(one_by_one, kind, part):
    found = gradient(kind, micro_batches(kind, accumulate=2), **PARTS[part]())
    assert difference(found, one_by_one[kind]) <= BOUND


def test_documents_that_run_one_by_one_are_refused():
    with pytest.raises(UnsupportedModelError, match="one_by_one"):
        gradient("dpo", micro_batches("dpo", accumulate=1), strategy=FastFTStrategy(attention="one_by_one"))


def test_documents_that_run_one_by_one_are_refused_in_a_second_run():
    tuner, batches = make_tuner("orpo"), micro_batches("orpo", accumulate=1)
    make_trainer(FastFTStrategy(), num_ranks=1, max_steps=1).fit(tuner, DataLoader(batches, batch_size=None))
    trainer = make_trainer(FastFTStrategy(attention="one_by_one"), num_ranks=1, max_steps=1)
    with pytest.raises(UnsupportedModelError, match="one_by_one"):
        trainer.fit(tuner, DataLoader(batches, batch_size=None))


@pytest.mark.covering
@pytest.mark.parametrize("kind", ["dpo", "orpo", "reward", "grpo", "distillation"])
@pytest.mark.parametrize("policy", ["keep", "recompute", "offload"])
def test_mixtures_of_experts_train_as_one_by_one(kind, policy):
    truth = gradient(kind, micro_batches(kind, accumulate=NUM_EXAMPLES, shares_prompts=False), config=MIXTURE)
    strategy = FastFTStrategy(activations=OffloadCheckpointing(policy))
    batches = micro_batches(kind, accumulate=2)
    found = gradient(kind, batches, config=MIXTURE, strategy=strategy, callbacks=[BincountRouter(), FusedKernels()])
    assert difference(found, truth) <= BOUND


@pytest.fixture(scope="module")
def saved_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    make_teacher(DENSE).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory, saved_model):
    path = tmp_path_factory.mktemp("ranks") / "gradients"
    run_two_ranks("tests.support.tuner_ranks_worker", path, saved_model)
    return [torch.load(f"{path}.{rank}", weights_only=True) for rank in range(2)]


@pytest.mark.fault
@pytest.mark.parametrize("case", cases(), ids=lambda case: "-".join(map(str, case)))
def test_ranks_train_as_one_by_one(one_by_one, two_ranks, case):
    for name, value in two_ranks[0][case].items():
        assert torch.equal(value, two_ranks[1][case][name])
    assert difference(two_ranks[0][case], one_by_one[case[0]]) <= BOUND


@pytest.mark.fault
def test_the_head_of_a_reward_model_joins_shards_that_are_read_from_files(two_ranks, saved_model):
    truth = gradient("reward", micro_batches("reward", accumulate=1), config=saved_model)
    assert difference(two_ranks[0]["files"], truth) <= BOUND


@pytest.mark.fault
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "owned experts", "one example"])
def test_ranks_store_a_reference_together(two_ranks, strategy):
    # The reference is the model itself, and nothing is trained: an exchanged value would give another loss.
    for rank in two_ranks:
        losses = rank[f"stored, {strategy}"]
        assert losses["val_loss"] == pytest.approx(math.log(2), abs=1e-6)
        assert losses["train_loss"] == pytest.approx(math.log(2), abs=1e-6)


@pytest.mark.fault
@pytest.mark.parametrize("kind", ["rollouts", "on policy"])
def test_ranks_that_sample_their_own_rollouts_stay_equal(two_ranks, kind):
    for name, value in two_ranks[0][kind].items():
        assert torch.equal(value, two_ranks[1][kind][name])


@pytest.mark.fault
@pytest.mark.parametrize("kind", ["rollouts", "on policy"])
def test_ranks_go_on_inside_a_round_with_their_own_rollouts(two_ranks, kind):
    for rank in two_ranks:
        for name, value in rank[kind].items():
            assert torch.equal(value, rank[f"{kind}, resumed"][name]), name


@pytest.mark.fault
def test_ranks_that_own_experts_compare_with_the_policy_before_the_round(two_ranks):
    for rank in two_ranks:
        gathered, owned = (rank[f"rollouts, {experts} experts"] for experts in ("gathered", "owned"))
        assert difference(owned, gathered) <= BOUND


@pytest.mark.fault
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_ranks_read_one_store_of_a_teacher(two_ranks, strategy):
    found, live = two_ranks[0][f"stored teacher, {strategy}"], two_ranks[0]["live teacher"]
    for name, value in found.items():
        assert torch.equal(value, two_ranks[1][f"stored teacher, {strategy}"][name])
    assert difference(found, live) <= 1e-5


@pytest.mark.fault
def test_a_sharded_run_names_the_command_that_writes_the_store(two_ranks):
    for rank in two_ranks:
        assert "--trainer.strategy fastft --trainer.max_steps 1" in rank["refused, fsdp"]
