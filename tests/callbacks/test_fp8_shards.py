"""Frozen weights that FSDP2 gathers in e4m3: two ranks train as one process does with the same products, and the model
keeps its own weights.
"""

import functools

import pytest
import torch

from tests.callbacks.fp8_shards_worker import CASES, frozen_state, make, run, validate, whole_state
from tests.strategies.strategy_worker import difference
from tests.support.two_ranks import run_two_ranks

pytestmark = pytest.mark.slow

# The gradients of one window are fp32 sums in another order. Rows that then differ in a last digit may be rounded to
# another e4m3 number, which is 1/16 away, so weights have a wider bound, and losses of the second window one that is a
# share of what the step between the windows, which hold the same packs, has changed.
BOUND, LATER_BOUND, LATER_SHARE = 1e-6, 1e-4, 0.02
NUM_PRODUCTS = "8 products of 2 layers in e4m3, in plain PyTorch"


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fp8")
    run_two_ranks("tests.callbacks.fp8_shards_worker", "cpu", folder)
    return torch.load(folder / "cpu.pt", weights_only=True)


@functools.cache
def one_process(family="qwen3", policy="recompute", dtype="float32"):
    """Return a module that one process has trained, and what was found."""
    module = make(family, dtype=dtype)
    return module, run(module, policy=policy, name="one")


def check_equal(found, expected, *, bound=BOUND):
    # Every second micro-batch of one process is that of the first rank.
    losses, expected_losses = found["losses"], expected["losses"][::2]
    assert torch.equal(losses[:2], expected_losses[:2])
    change = (expected_losses[2:] - expected_losses[:2]).abs()
    assert ((losses - expected_losses)[2:].abs() <= LATER_SHARE * change).all()
    assert difference(found["gradients"], expected["gradients"]) <= bound


@pytest.mark.parametrize("case", CASES, ids=str)
def test_two_ranks_equal_one_process_with_fp8_products(two_ranks, case):
    found = two_ranks[case]
    check_equal(found, one_process(*case[:2])[1])
    ((name, state, reason, _),) = found["status"]
    assert (name, state) == ("fp8 products", "active")
    assert reason.startswith(NUM_PRODUCTS)
    assert reason.endswith("on the host")


def test_a_base_in_bf16_with_fp32_adapters_equals_one_process(two_ranks):
    # Gradients of replicated adapters are bf16 products.
    check_equal(two_ranks["bfloat16"], one_process(dtype="bfloat16")[1])


def test_a_quarter_of_the_bytes_of_fp32_layers_is_gathered(two_ranks):
    """The tensors outside of the layers and the norms keep their dtype."""
    frozen = frozen_state(one_process()[0])
    layers = sum(value.numel() for name, value in frozen.items() if name.endswith("proj.base_layer.weight"))
    # In the forward, and again in the backward.
    saved = 2 * 3 * layers
    assert two_ranks[CASES[0]]["gathered_bytes"] == [
        num_bytes - saved for num_bytes in two_ranks["model_dtype"]["gathered_bytes"]
    ]


def test_resident_units_are_gathered_once(two_ranks):
    first, *later = two_ranks[CASES[1]]["gathered_bytes"]
    assert 0 < first < two_ranks[CASES[0]]["gathered_bytes"][0]
    assert not any(later)


def test_states_hold_the_models_own_weights_during_and_after_the_run(two_ranks):
    module, _ = one_process()
    expected = whole_state(module)
    for found in (two_ranks["inside"]["state"], two_ranks["inside"]["after"], two_ranks["twice"][0]):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], value) for name, value in frozen_state(module).items())
        assert difference(found, expected) <= LATER_BOUND


def test_a_run_without_fp8_after_it_gathers_the_models_own_weights(two_ranks):
    module = make("qwen3")
    run(module, name="one")
    run(module, base=None, name="one")
    assert difference(two_ranks["twice"][1], whole_state(module)) <= LATER_BOUND


def test_a_validation_alone_equals_that_of_one_process(two_ranks):
    found, expected = two_ranks["validated"], validate("qwen3", name="one")
    assert abs(found["loss"] / expected["loss"] - 1) <= BOUND
    assert all(torch.equal(found["state"][name], value) for name, value in expected["state"].items())


def test_a_call_that_needs_the_weights_is_refused(two_ranks):
    assert "FSDP2 gathers them in e4m3" in two_ranks["inside"]["refusal"]


def test_shards_stay_on_a_device_whose_host_has_no_room(two_ranks):
    found = two_ranks["no host memory"]
    assert found["status"][0][2].endswith("on the device")
    assert difference(found["state"], two_ranks[CASES[0]]["state"]) == 0


def test_trained_sharded_weights_run_in_the_dtype_of_the_model(two_ranks):
    ((_, state, reason, _),) = two_ranks["trained"]["status"]
    assert (state, reason.partition(";")[0]) == ("inactive", "trained weights are sharded (FSDP2)")
