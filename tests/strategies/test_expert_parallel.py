"""Experts in shards, gathered or owned by ranks: the losses, gradients, weights and files of one process."""

from types import SimpleNamespace

import pytest
import torch

from lightning_fastft.callbacks.bincount_router import BincountRouter
from lightning_fastft.callbacks.fused_kernels import FusedKernels
from lightning_fastft.core.errors import OptionError
from lightning_fastft.strategies.expert_parallel import check_callbacks
from tests.strategies import expert_worker as worker
from tests.strategies.strategy_worker import difference
from tests.support.two_ranks import run_two_ranks

# fp32 sums in another order.
BOUND = 1e-6
MORE_CASES = [name for name in worker.CASES if name != worker.QUICK]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What the ranks found in a part, and their folder; computed once."""
    done = {}

    def look_up(part, *arguments, num_ranks=2):
        if part not in done:
            folder = tmp_path_factory.mktemp(part)
            run_two_ranks("tests.strategies.expert_worker", part, folder, *arguments, num_ranks=num_ranks)
            done[part] = torch.load(folder / f"{part}.pt", weights_only=True), folder
        return done[part]

    return look_up


def check_same(found, truth):
    assert torch.allclose(found["losses"], truth["losses"], rtol=BOUND, atol=0)
    assert difference(found["gradients"], truth["gradients"]) <= BOUND
    assert difference(found["state"], truth["state"]) <= BOUND


@pytest.mark.covering
@pytest.mark.slow
@pytest.mark.parametrize("route", worker.ROUTES)
@pytest.mark.parametrize("family", worker.FAMILIES)
def test_owned_experts_compute_what_all_experts_do(ranks, family, route):
    assert ranks("quick")[0]["layers"][family, route] <= BOUND


@pytest.mark.slow
@pytest.mark.parametrize("fault", worker.FAULTS, ids=lambda fault: fault.__name__)
def test_planted_faults_are_seen(ranks, fault):
    assert ranks("quick")[0]["layers"][fault.__name__] > 1e5 * BOUND


@pytest.mark.slow
def test_two_ranks_that_own_experts_train_as_one_process(ranks):
    found = ranks("quick")[0][worker.QUICK]
    check_same(found, worker.train(worker.QUICK))
    assert "each device owns 1/2 of all experts" in found["statuses"]


@pytest.mark.fault
@pytest.mark.parametrize("name", MORE_CASES)
def test_two_ranks_train_as_one_process(ranks, name):
    check_same(ranks("all")[0][name], worker.train(name))


@pytest.mark.fault
def test_two_copies_of_two_owners_train_as_one_copy(ranks):
    check_same(ranks("copies", num_ranks=4)[0][worker.QUICK], worker.train(worker.QUICK))


@pytest.mark.fault
def test_ranks_that_share_packs_own_experts_too(ranks):
    gathered, owned = ranks("all")[0]["parts"]
    assert difference(owned["state"], gathered["state"]) <= BOUND
    assert float(owned["val_loss"]) == pytest.approx(float(gathered["val_loss"]), rel=BOUND)


@pytest.mark.fault
@pytest.mark.parametrize("is_folder", [True, False])
@pytest.mark.parametrize("name", worker.SAVED)
def test_a_resumed_run_equals_the_uninterrupted_one(ranks, name, is_folder):
    whole, resumed = (ranks("all")[0][name, is_folder, form] for form in ("whole", "resumed"))
    assert difference(resumed, whole) == 0


@pytest.mark.fault
def test_one_process_goes_on_from_a_file_of_owners(ranks):
    found, folder = ranks("all")
    path = worker.place_of("qwen, owned", folder, is_folder=False) / "step=2.ckpt"
    with pytest.warns(UserWarning, match="random states of 2 ranks"):
        state = worker.resume("qwen, owned", path)
    assert difference(state, found["qwen, owned", False, "whole"]) <= 1e-4


@pytest.mark.fault
def test_gathered_experts_go_on_from_a_folder_of_owners(ranks):
    found, folder = ranks("all")
    path = worker.place_of("qwen, owned", folder, is_folder=True) / "step=2.ckpt"
    assert difference(ranks("exchange", path)[0], found["qwen, owned", True, "whole"]) <= 1e-4


@pytest.mark.fault
@pytest.mark.parametrize("is_folder", [True, False])
def test_adapters_that_were_whole_go_on_sharded(ranks, is_folder):
    found = ranks("all")[0]["placed"][is_folder]
    assert "whole on every device" in found["replicate"]["statuses"]
    assert "whole on every device" not in found["auto"]["statuses"]
    assert difference(found["auto"]["state"], found["replicate"]["state"]) <= BOUND


@pytest.mark.fault
def test_owned_experts_are_fp32_masters_of_bf16_arithmetic(ranks):
    found = ranks("all")[0]["bf16"]
    owned, sharded = found["qwen, owned"], found["qwen, sharded"]
    assert [owned["held"], owned["gradient"]] == ["torch.float32"] * 2
    assert difference(owned["gradients"], sharded["gradients"]) <= 0.02


@pytest.mark.fault
def test_sharded_adapters_on_experts_are_cast_in_each_pass(ranks):
    found, truth = ranks("all")[0]["bf16 lora"], worker.train("qwen, lora, sharded", dtype="bfloat16")
    assert difference(found["state"], truth["state"]) <= BOUND


@pytest.mark.fault
@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("dense", "has no MoE layers"),
        ("no router", "needs BincountRouter"),
        ("nf4", "experts in NF4"),
        ("three experts", "has 3 experts, which 2 does not divide"),
    ],
)
def test_what_cannot_be_served_is_refused(ranks, case, message):
    assert message in ranks("all")[0]["refused"][case]


def test_layers_that_run_as_cuda_graphs_are_refused():
    trainer = SimpleNamespace(callbacks=[BincountRouter(), FusedKernels(cuda_graphs="auto")])
    with pytest.raises(OptionError, match="expert_parallel=2 exchanges tokens inside of each layer"):
        check_callbacks(trainer, size=2)
