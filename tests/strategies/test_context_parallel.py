"""Context parallelism: the parts of packs on several ranks give the losses, gradients and weights of whole packs."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from lightning.fabric.plugins.environments import LightningEnvironment

from lightning_fastft.callbacks.fused_kernels import FusedKernels
from lightning_fastft.core.errors import ContextError, OptionError, UnsupportedModelError
from lightning_fastft.core.patcher import ModelPatcher
from lightning_fastft.patches.packed import install_packed_training
from lightning_fastft.strategies.context_parallel import check_head, check_module, check_run
from lightning_fastft.strategies.ddp import FastFTDDPStrategy
from lightning_fastft.strategies.fsdp2 import FastFTFSDPStrategy
from lightning_fastft.strategies.single_device import FastFTStrategy
from lightning_fastft.training.preference import PreferenceTuner
from tests.strategies import context_fit_worker as fits
from tests.strategies.context_worker import CASES, FAULTS, MORE_CASES
from tests.strategies.strategy_worker import difference
from tests.support.packs import make_batch
from tests.support.tiny_models import build_tiny
from tests.support.two_ranks import run_two_ranks

# fp32 sums in another order.
BOUND = 1e-5


@pytest.fixture(scope="module")
def compare(tmp_path_factory):
    """What the ranks found for some cases; computed once."""
    done = {}

    def look_up(cases, num_ranks):
        if (cases, num_ranks) not in done:
            folder = tmp_path_factory.mktemp("compare")
            run_two_ranks("tests.strategies.context_worker", cases, folder, num_ranks=num_ranks)
            done[cases, num_ranks] = torch.load(folder / "found.pt", weights_only=True)
        return done[cases, num_ranks]

    return look_up


@pytest.fixture(scope="module")
def fit(tmp_path_factory):
    """What each rank trained in a part, and what one process trained; computed once."""
    done = {}

    def look_up(part, num_ranks):
        if part not in done:
            folder = tmp_path_factory.mktemp("fit")
            run_two_ranks("tests.strategies.context_fit_worker", part, folder, num_ranks=num_ranks)
            ranks = [torch.load(folder / f"found-{rank}.pt", weights_only=True) for rank in range(num_ranks)]
            done[part] = folder, ranks
        return done[part]

    return look_up


def check_errors(found):
    assert max(found["loss"], found["evaluation"], found["gradients"]) <= BOUND, found
    assert found["reads"]


@pytest.mark.slow(6)
@pytest.mark.parametrize("name", CASES)
def test_two_parts_give_the_losses_and_gradients_of_the_pack(compare, name):
    check_errors(compare("cases", 2)[name])


@pytest.mark.fault
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("name", MORE_CASES)
def test_parts_give_the_losses_and_gradients_of_the_pack(compare, name, num_ranks):
    check_errors(compare("more", num_ranks)[name])


@pytest.mark.fault
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_planted_faults_are_seen(compare, fault):
    assert compare("faults", 2)[fault.__name__]["gradients"] > 100 * BOUND


def check_same(found, truth):
    assert difference(found[0]["state"], truth["state"]) <= BOUND
    assert all(rank["validation"] == pytest.approx(truth["validation"], rel=BOUND) for rank in found)
    assert sum(rank["labelled"] for rank in found) == truth["labelled"]


def resume_alone(kind, folder, name):
    """The rest of a run of several ranks in one process."""
    path = folder / name / f"step={fits.SAVED_STEP}.ckpt"
    with pytest.warns(UserWarning, match="random states of 2 ranks"):
        return fits.train(kind, strategy=FastFTStrategy(), devices=1, folder=folder / "alone", ckpt_path=path)


@pytest.mark.slow(10)
def test_ddp_trains_logs_and_resumes_as_one_process(fit, tmp_path):
    folder, ranks = fit("quick", 2)
    truth = fits.train("lora", strategy=FastFTStrategy(), devices=1, folder=tmp_path)
    check_same([found["ddp"] for found in ranks], truth)
    for found in ranks:
        assert found["ddp"]["losses"] == pytest.approx(truth["losses"], rel=BOUND)
        assert found["ddp"]["plan"] == truth["plan"]
        assert difference(found["ddp", "resumed"]["state"], found["ddp"]["state"]) == 0
    assert difference(resume_alone("lora", folder, "ddp")["state"], truth["state"]) <= BOUND
    assert "replicate 1 x shard 1 x context 2" in ranks[0]["ddp"]["mesh"]


@pytest.mark.fault
def test_fsdp_trains_and_resumes_as_one_process(fit, tmp_path):
    _, ranks = fit("two", 2)
    truth = fits.train("full", strategy=FastFTStrategy(), devices=1, folder=tmp_path)
    check_same([found["fsdp"] for found in ranks], truth)
    assert difference(ranks[0]["fsdp", "resumed"]["state"], ranks[0]["fsdp"]["state"]) == 0


@pytest.mark.fault
@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("ddp 2 x 2", "replicate 2 x shard 1 x context 2"),
        ("fsdp 2 x 2", "replicate 1 x shard 2 x context 2"),
        ("hybrid 2 x 2", "replicate 2 x shard 1 x context 2"),
    ],
)
def test_two_groups_of_two_train_as_two_ranks(fit, name, mesh):
    _, ranks = fit("four", 4)
    _, two = fit("groups", 2)
    kind = fits.RUNS[name][1]
    check_same(
        [found[name] for found in ranks], {**two[0][kind], "labelled": sum(rank[kind]["labelled"] for rank in two)}
    )
    assert mesh in ranks[0][name]["mesh"]


def sizes_of(strategy, *, devices):
    """Check the sizes of a strategy as ``setup_environment`` does before it joins other ranks."""
    strategy.parallel_devices = [torch.device("cpu")] * devices
    strategy.cluster_environment = LightningEnvironment()
    with mock.patch("lightning_fastft.strategies.mixin.FastFTStrategyMixin.setup_environment", side_effect=JoinedError):
        strategy.setup_environment()


class JoinedError(Exception):
    """The sizes were accepted."""


@pytest.mark.parametrize(
    ("make_strategy", "devices", "message"),
    [
        (lambda: FastFTDDPStrategy(context_parallel=3), 4, "context_parallel must be 1, 2 or 4"),
        (lambda: FastFTFSDPStrategy(context_parallel=3), 4, "context_parallel must be 1, 2 or 4"),
        (lambda: FastFTFSDPStrategy(context_parallel=4, shard=2), 8, "shard must be 4 or 8 with context_parallel=4"),
        (lambda: FastFTFSDPStrategy(context_parallel=2, tensor_parallel_size=2), 4, "tensor parallelism"),
        (lambda: FastFTDDPStrategy(context_parallel=0), 4, "context_parallel"),
        (lambda: FastFTDDPStrategy(context_parallel=2, attention="one_by_one"), 4, "one_by_one"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(make_strategy, devices, message):
    with pytest.raises(OptionError, match=message):
        sizes_of(make_strategy(), devices=devices)


@pytest.mark.parametrize("strategy", [FastFTDDPStrategy(context_parallel=2), FastFTFSDPStrategy(context_parallel=4)])
def test_sizes_that_fit_are_accepted(strategy):
    with pytest.raises(JoinedError):
        sizes_of(strategy, devices=4)


@pytest.mark.parametrize(
    ("family", "size", "overrides", "message"),
    [
        ("llama", 3, {}, "4 query heads.*Use a divisor"),
        ("qwen3_next", 2, {}, "recurrent mixers.*Set context_parallel=1"),
        ("qwen3_vl", 2, {}, "image or audio tower.*Set context_parallel=1"),
        ("mixtral", 2, {"output_router_logits": True}, "output_router_logits=False"),
        ("llama4_text", 2, {"attn_temperature_tuning": True}, "attn_temperature_tuning.*Set context_parallel=1"),
    ],
)
def test_models_that_need_whole_packs_are_refused_by_name(family, size, overrides, message):
    with pytest.raises(UnsupportedModelError, match=rf"{family.split('_')[0]}.*{message}"):
        check_module(build_tiny(family, **overrides), size=size)


def test_modules_that_need_whole_packs_are_refused():
    with pytest.raises(UnsupportedModelError, match="PreferenceTuner needs whole packs"):
        check_module(PreferenceTuner({"model_type": "qwen3"}, init="random", lora={"r": 4}), size=2)
    with pytest.raises(UnsupportedModelError, match="holds none"):
        check_module(torch.nn.Linear(2, 2), size=2)


def test_runs_that_need_whole_packs_are_refused():
    graphs = SimpleNamespace(state=SimpleNamespace(fn="fit"), callbacks=[FusedKernels(cuda_graphs="auto")])
    with pytest.raises(OptionError, match="CUDA graphs"):
        check_run(graphs, size=2)
    with pytest.raises(OptionError, match=r"trainer\.predict"):
        check_run(SimpleNamespace(state=SimpleNamespace(fn="predict")), size=2)


def test_a_model_with_a_loss_of_its_own_is_refused():
    model = build_tiny("llama")
    model.lm_head = torch.nn.Sequential(model.lm_head)
    statuses = install_packed_training(model, ModelPatcher()).statuses
    with pytest.raises(UnsupportedModelError, match="loss head"):
        check_head(statuses, size=2)
    check_head(install_packed_training(build_tiny("llama"), ModelPatcher()).statuses, size=2)


def test_a_batch_that_is_not_packed_is_refused():
    with pytest.raises(ContextError, match="packed batches"):
        FastFTDDPStrategy(context_parallel=2).batch_to_device({"input_ids": torch.zeros(1, 4)})


def test_ranks_with_different_packs_are_refused(monkeypatch):
    def gather(found, own, group):
        found[:] = [own, ((4,), own[1])]

    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    with pytest.raises(ContextError, match="different packs"):
        FastFTDDPStrategy(context_parallel=2)._compare(make_batch((3, 1)), None)
