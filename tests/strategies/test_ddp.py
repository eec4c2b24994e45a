"""FastFTDDPStrategy: two ranks give the weights of one process with twice the accumulation, and send once per
optimizer step.
"""

import pickle
from unittest import mock

import pytest
import torch
from lightning.pytorch.strategies import StrategyRegistry

from lightning_fastft.activations.checkpointing import OffloadCheckpointing
from lightning_fastft.core.errors import OptionError
from lightning_fastft.strategies.ddp import FastFTDDPStrategy
from lightning_fastft.strategies.registry import register_strategies
from tests.strategies.strategy_worker import (
    ACCUMULATE,
    BOUND,
    DDP_EQUALITY,
    MONITORED,
    NUM_WINDOWS,
    difference,
    run_on_two_ranks,
    train,
)
from tests.support.training_parts import quiet_trainer

register_strategies()


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    return run_on_two_ranks("ddp", tmp_path_factory.mktemp("ddp"))


@pytest.mark.slow
@pytest.mark.parametrize("case", DDP_EQUALITY, ids=str)
def test_two_ranks_equal_one_process_with_twice_the_accumulation(two_ranks, case):
    assert difference(two_ranks[case], train(*case, "one")[0]) <= BOUND


@pytest.mark.slow
@pytest.mark.parametrize("case", DDP_EQUALITY, ids=str)
def test_gradients_are_sent_once_per_window(two_ranks, case):
    last_of_each = [window * ACCUMULATE + ACCUMULATE - 1 for window in range(NUM_WINDOWS)]
    assert two_ranks[(*case, "batches with a reduction")] == last_of_each


@pytest.mark.slow
@pytest.mark.parametrize(("option", "policy"), [("static_graph", "recompute"), ("find_unused_parameters", "recompute")])
def test_options_of_ddp_arrive_and_train_the_same(two_ranks, option, policy):
    is_set, state = two_ranks["options"][option]
    assert is_set is True
    assert difference(state, train("lora", policy, "one")[0]) <= BOUND


@pytest.mark.slow
def test_no_micro_batch_waits_for_the_device_to_learn_of_a_signal(two_ranks):
    # Lightning asks before each micro-batch.
    assert two_ranks["asked"] == {True: (0, False), False: (NUM_WINDOWS * ACCUMULATE, False)}
    assert two_ranks["after a failure"] == (True, False)
    assert two_ranks["signals on one rank"] is False


@pytest.mark.slow
def test_ranks_follow_the_mean_of_a_metric_that_differs_between_them(two_ranks):
    assert two_ranks["monitored"] == [MONITORED, MONITORED]


@pytest.mark.slow
def test_resumed_run_equals_the_uninterrupted_one_and_saves_adapters_only(two_ranks):
    whole, resumed = two_ranks["checkpoint", "uninterrupted"], two_ranks["checkpoint", "resumed"]
    assert all(torch.equal(value, resumed["state"][name]) for name, value in whole["state"].items())
    assert whole["keys"]
    assert all("lora_" in key for key in whole["keys"])


@pytest.mark.parametrize("name", ["fastft_ddp", "fastft_fsdp"])
def test_name_lands_on_all_gpus(tmp_path, name):
    with (
        mock.patch("lightning.fabric.accelerators.cuda.num_cuda_devices", return_value=2),
        mock.patch("lightning.pytorch.accelerators.cuda.num_cuda_devices", return_value=2),
    ):
        strategy = quiet_trainer(tmp_path, strategy=name, accelerator="cuda", devices=2).strategy
    assert type(strategy) is StrategyRegistry[name]["strategy"]
    assert strategy.parallel_devices == [torch.device("cuda", 0), torch.device("cuda", 1)]
    assert strategy.root_device == torch.device("cuda", 0)


def test_two_devices_for_the_single_device_strategy_are_refused_with_the_names_to_use(tmp_path):
    with pytest.raises(OptionError, match=r"fastft_ddp.*fastft_fsdp"):
        quiet_trainer(tmp_path, strategy="fastft", devices=2)


def test_strategy_pickles_before_setup():
    strategy = pickle.loads(
        pickle.dumps(FastFTDDPStrategy(activations=OffloadCheckpointing("recompute"), find_unused_parameters=True))
    )
    assert strategy.checkpointing.policy == "recompute"
    assert strategy._ddp_kwargs == {"find_unused_parameters": True, "gradient_as_bucket_view": True}
    assert FastFTDDPStrategy(gradient_as_bucket_view=False)._ddp_kwargs == {"gradient_as_bucket_view": False}


def test_wrong_activations_are_refused():
    with pytest.raises(OptionError, match="OffloadCheckpointing"):
        FastFTDDPStrategy(activations="recompute")
