"""OffloadCheckpointing: recompute runs each layer twice, changes no bit of a gradient, and is the only switch."""

import copy
import pickle

import pytest
import torch
from torch import nn

from lightning_fastft.activations.checkpointing import OffloadCheckpointing
from lightning_fastft.core.errors import OptionError, SwapError
from lightning_fastft.core.patcher import ModelPatcher
from lightning_fastft.patches.packed import install_packed_training
from tests.support.training_parts import packed_batches, tiny_llama

# Most models here have no packed attention.
pytestmark = pytest.mark.usefixtures("unprepared_models")


class CountForwards:
    """Count how often the forward of each decoder layer really runs."""

    def __init__(self, model):
        self.num_runs = 0
        for layer in model.model.layers:
            # Inside the layer, where both versions of transformers run again in the backward.
            layer.mlp.register_forward_pre_hook(self.count)

    def count(self, module, args):
        self.num_runs += 1


def attach(model, policy, patcher=None):
    patcher = patcher or ModelPatcher()
    layers = list(model.model.layers)
    return OffloadCheckpointing(policy).attach(layers, patcher, containers=[model.model]), patcher


@pytest.mark.parametrize(("policy", "num_runs"), [("keep", 2), ("recompute", 4)])
def test_each_policy_runs_the_layers_as_often_as_it_says(policy, num_runs):
    model = tiny_llama()
    counter = CountForwards(model)
    status, _ = attach(model, policy)
    assert status.state == "active"
    assert status.reason.startswith(policy)
    model(**packed_batches(1)[0]).loss.backward()
    assert counter.num_runs == num_runs


def test_gradients_are_bit_equal_for_every_policy():
    kept = tiny_llama()
    recomputed = copy.deepcopy(kept)
    batch = packed_batches(1)[0]
    for model, policy in ((kept, "keep"), (recomputed, "recompute")):
        install_packed_training(model, ModelPatcher(), checkpointing=OffloadCheckpointing(policy))
        model(**batch).loss.backward()
    for (name, expected), value in zip(kept.named_parameters(), recomputed.parameters()):
        assert torch.equal(expected.grad, value.grad), name


def test_masks_are_built_once_with_recompute():
    model = tiny_llama()
    install_packed_training(model, ModelPatcher(), checkpointing=OffloadCheckpointing("recompute"))
    batch = packed_batches(1)[0]
    model(**batch).loss.backward()
    assert batch.context.num_reads == 4
    assert set(batch.context.num_builds.values()) == {1}


@pytest.mark.parametrize("is_training", [True, False])
def test_inert_without_gradients_and_in_evaluation(is_training):
    model = tiny_llama()
    attach(model, "recompute")
    counter = CountForwards(model)
    model.train(is_training)
    batch = packed_batches(1)[0]
    with torch.set_grad_enabled(not is_training):
        loss = model(**batch).loss
    if not is_training:
        loss.backward()
    assert counter.num_runs == 2


def test_undo_restores_every_attribute():
    model = tiny_llama()
    before = [dict(vars(module)) for module in model.modules()]
    _, patcher = attach(model, "recompute")
    assert model.is_gradient_checkpointing
    patcher.undo()
    assert not model.is_gradient_checkpointing
    assert [vars(module) for module in model.modules()] == before


def test_keep_refuses_a_model_that_recomputes_already():
    model = tiny_llama()
    model.gradient_checkpointing_enable()
    with pytest.raises(OptionError, match="already recomputes"):
        attach(model, "keep")


def test_recompute_takes_over_and_gives_back():
    model = tiny_llama()
    model.gradient_checkpointing_enable()
    own = model.model.layers[0]._gradient_checkpointing_func
    status, patcher = attach(model, "recompute")
    assert "taken over" in status.reason
    assert model.model.layers[0]._gradient_checkpointing_func is not own
    patcher.undo()
    assert model.model.layers[0]._gradient_checkpointing_func is own
    assert model.is_gradient_checkpointing


@pytest.mark.parametrize("where", ["attention", "module"])
def test_dropout_is_replayed_and_the_random_state_is_kept_only_for_it(where):
    without = tiny_llama()
    attach(without, "recompute")
    assert not without.model.layers[0]._gradient_checkpointing_func.__self__.is_random

    with_dropout = tiny_llama(attention_dropout=0.5 if where == "attention" else 0.0)
    if where == "module":
        with_dropout.model.layers[1].mlp.act_fn = nn.Sequential(nn.SiLU(), nn.Dropout(0.5))
    plain = copy.deepcopy(with_dropout)
    attach(with_dropout, "recompute")
    where_random = with_dropout.model.layers[0 if where == "attention" else 1]
    assert where_random._gradient_checkpointing_func.__self__.is_random
    ids = torch.randint(1, 90, (1, 12))
    for model in (plain, with_dropout):
        torch.manual_seed(3)
        model(input_ids=ids, labels=ids).loss.backward()
    for (name, expected), value in zip(plain.named_parameters(), with_dropout.parameters()):
        assert torch.equal(expected.grad, value.grad), name


def test_evaluation_mode_is_refused_where_layers_would_not_recompute():
    model = tiny_llama().eval()
    with pytest.raises(OptionError, match=r"\.train\(\)"):
        OffloadCheckpointing("recompute").check_training_mode(list(model.model.layers))
    OffloadCheckpointing("keep").check_training_mode(list(model.model.layers))
    OffloadCheckpointing("recompute").check_training_mode(list(model.train().model.layers))


def test_frozen_layers_may_be_in_evaluation_mode():
    model = tiny_llama().eval().requires_grad_(False)
    OffloadCheckpointing("recompute").check_training_mode(list(model.model.layers))
    next(model.model.layers[1].parameters()).requires_grad_(True)
    with pytest.raises(OptionError, match=r"1 of 2"):
        OffloadCheckpointing("recompute").check_training_mode(list(model.model.layers))


def test_attached_model_can_be_copied_and_pickled():
    model = tiny_llama()
    attach(model, "recompute")
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        counter = CountForwards(twin)
        twin(**packed_batches(1)[0]).loss.backward()
        assert counter.num_runs == 4


def test_nothing_to_attach_to_is_an_error():
    with pytest.raises(SwapError, match="no decoder layer"):
        OffloadCheckpointing("recompute").attach([], ModelPatcher())


@pytest.mark.parametrize("nothing", [0, 0.0, 1e-10])
def test_a_budget_of_nothing_is_refused_on_any_device(nothing):
    with pytest.raises(OptionError, match="vram_budget must be more than 0 GiB"):
        OffloadCheckpointing(vram_budget=nothing)
    assert OffloadCheckpointing(host_budget=nothing).options.host_budget_bytes == 0


def test_unknown_policy_is_refused():
    with pytest.raises(OptionError, match="'keep', 'offload', 'recompute'"):
        OffloadCheckpointing("always")


@pytest.mark.gpu
def test_recompute_lowers_the_peak_on_a_gpu():
    peaks = {}
    batch = packed_batches(1)[0].to("cuda")
    for policy in ("keep", "recompute"):
        model = tiny_llama().to("cuda", torch.bfloat16)
        install_packed_training(model, ModelPatcher(), checkpointing=OffloadCheckpointing(policy))
        torch.cuda.reset_peak_memory_stats()
        base = torch.cuda.memory_allocated()
        loss = model(**batch).loss
        peaks[policy] = torch.cuda.memory_allocated() - base
        loss.backward()
    assert peaks["recompute"] < peaks["keep"]
