"""The check at the start of a run refuses what leaks between documents, by name, and passes what does not."""

import copy

import pytest
import torch
from torch import nn

from benchmarks.model_types import build_model
from lightning_fastft.core.errors import UnsupportedModelError
from lightning_fastft.core.patcher import ModelPatcher
from lightning_fastft.hf.families import FAMILIES
from lightning_fastft.patches.packed import install_packed_training
from lightning_fastft.strategies.single_device import FastFTStrategy
from lightning_fastft.training.fine_tuner import FineTuner
from tests.support.packs import make_batch
from tests.support.tiny_models import build_tiny
from tests.support.training_parts import quiet_trainer
from tests.support.two_ranks import run_two_ranks

# Outside the list of tested families: dense, a mixture, sinks of another kind.
OTHERS = ("gemma", "qwen2_moe", "granitemoe")


def checked(model):
    """Return the status of the check, or None for a tested family."""
    (check,) = install_packed_training(model, ModelPatcher()).checks
    return check()


def drop_context(layer):
    """Plant: attention that is not told where documents begin."""
    layer.self_attn.register_forward_pre_hook(
        lambda module, args, kwargs: (args, {**kwargs, "context": None}), with_kwargs=True
    )


def shift_tokens(layer):
    """Plant: a norm that looks at the token before, across the start of a document."""
    layer.input_layernorm.register_forward_pre_hook(lambda module, args: (args[0] + 0.5 * args[0].roll(1, dims=1),))


def count_positions_from_the_pack(model):
    """Plant: positions that go on over documents."""

    def number(module, args, kwargs):
        ids = args[0] if args else kwargs["input_ids"]
        return args, {**kwargs, "position_ids": torch.arange(ids.shape[1], device=ids.device)[None]}

    model.transformer.register_forward_pre_hook(number, with_kwargs=True)


@pytest.mark.covering
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OTHERS)
def test_a_family_without_a_leak_passes(name, dtype):
    assert build_tiny(name).config.model_type not in FAMILIES
    status = checked(build_tiny(name).to(dtype))
    assert status.state == "active"
    assert "rounding explains" in status.reason


@pytest.mark.covering
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OTHERS)
def test_what_leaks_is_refused_with_the_family_and_the_difference(name, dtype):
    model = build_tiny(name).to(dtype)
    shift_tokens(model.model.layers[0])
    with pytest.raises(UnsupportedModelError, match=rf"\({name}\) gives other logits.*rounding explains"):
        checked(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_positions_of_the_pack_are_refused(dtype):
    """Rotary embeddings know distances only, so the family has learned positions."""
    model = build_model("gpt2").to(dtype)
    assert checked(copy.deepcopy(model)).state == "active"
    count_positions_from_the_pack(model)
    with pytest.raises(UnsupportedModelError, match=r"\(gpt2\) gives other logits"):
        checked(model)


@pytest.mark.parametrize("silent", [[0], [1]])
def test_a_layer_that_does_not_read_is_refused_by_its_number(silent):
    model = build_tiny("gemma")
    for number in silent:
        drop_context(model.model.layers[number])
    with pytest.raises(UnsupportedModelError, match=rf"Decoder layers \[{silent[0]}\]"):
        checked(model)


def test_attention_that_never_reads_is_refused_by_its_difference():
    model = build_tiny("gemma")
    for layer in model.model.layers:
        drop_context(layer)
    with pytest.raises(UnsupportedModelError, match="gives other logits"):
        checked(model)


def test_a_tested_family_is_not_run():
    model = build_tiny("llama")
    model.model.layers[0].register_forward_pre_hook(lambda *_: pytest.fail("it ran"))
    assert checked(model) is None


def test_nothing_of_the_model_and_of_the_run_changes():
    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(1))

        def forward(self, x):
            self.seen += 1
            return nn.functional.dropout(x, 0.5, self.training)

    model = build_tiny("gemma").train()
    model.model.layers[0].mlp = nn.Sequential(model.model.layers[0].mlp, Counter())
    model.model.layers[1].eval()
    weights, modes = copy.deepcopy(model.state_dict()), [module.training for module in model.modules()]
    torch.manual_seed(3)
    state = torch.get_rng_state()
    hooks = [len(module._forward_pre_hooks) for module in model.modules()]
    (check,) = install_packed_training(model, patcher := ModelPatcher()).checks
    assert check().state == "active"
    assert torch.equal(torch.get_rng_state(), state)
    assert modes == [module.training for module in model.modules()]
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in weights.items())
    assert all(parameter.grad is None for parameter in model.parameters())
    patcher.undo()
    assert hooks == [len(module._forward_pre_hooks) for module in model.modules()]


def test_the_guard_learns_the_reads_of_the_family():
    """A layer without attention reads nothing; after the check every step must read as often as the check did."""
    model = build_tiny("gemma")
    installed = install_packed_training(model, ModelPatcher())
    (check,) = installed.checks
    check()
    model(**make_batch())
    drop_context(model.model.layers[1])
    with pytest.raises(UnsupportedModelError, match="1 of 2"):
        model(**make_batch())


@pytest.mark.parametrize("is_leaky", [False, True])
def test_a_fit_checks_before_its_first_step(is_leaky):
    model = build_tiny("gemma")
    if is_leaky:
        shift_tokens(model.model.layers[0])
    steps = []

    class Tuner(FineTuner):
        def training_step(self, batch, batch_idx):
            steps.append(batch_idx)
            return super().training_step(batch, batch_idx)

    strategy = FastFTStrategy()
    trainer = quiet_trainer(strategy=strategy, max_steps=1)
    tuner = Tuner(model, lora={"r": 2}, warmup_share=0.0)
    loader = torch.utils.data.DataLoader([make_batch()], batch_size=None)
    if is_leaky:
        with pytest.raises(UnsupportedModelError, match=r"\(gemma\) gives other logits"):
            trainer.fit(tuner, loader)
        assert steps == []
    else:
        trainer.fit(tuner, loader)
        assert steps == [0]
        assert any(status.name == "check of documents" for status in strategy.packed_steps.statuses())


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fastft_fsdp", "fastft_ddp"])
def test_every_rank_checks_the_model_as_it_is_sharded(strategy):
    run_two_ranks("tests.patches.document_check_worker", strategy)
