"""Hybrids: packed documents against each document alone, and the faults that such a comparison must find."""

import copy
import os
import pickle

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from lightning_fastft.activations.checkpointing import OffloadCheckpointing
from lightning_fastft.callbacks.bincount_router import BincountRouter
from lightning_fastft.callbacks.fused_kernels import FusedKernels
from lightning_fastft.core.errors import BackendError, ShapeError, UnsupportedModelError
from lightning_fastft.core.patcher import ModelPatcher
from lightning_fastft.hf.mixers import MIXERS, find_mixers, mixer_family
from lightning_fastft.mixers import install
from lightning_fastft.mixers.install import install_mixers
from lightning_fastft.patches.packed import install_packed_training
from lightning_fastft.strategies.single_device import FastFTStrategy
from tests.support.host_waits import count_host_waits
from tests.support.packs import assert_close, make_batch, make_documents, run_one_by_one, run_packed, take_gradients
from tests.support.tiny_models import HYBRIDS, MISSING, VOCABULARY, build_tiny
from tests.support.training_parts import PlainModule, packed_loader, quiet_trainer
from tests.support.truth import relative_error

LENGTHS = (7, 1, 12, 2, 9)
# One family of each kind of mixer, with jamba, whose layers drop keywords.
KINDS = ["lfm2", "qwen3_5_text", "kimi_linear", "falcon_h1", "jamba"]


def mixers_of(model):
    return find_mixers(model, mixer_family(model))


def errors(model, *, lengths=LENGTHS, pad_to=None, policy="keep"):
    """Relative errors of a packed batch against its documents one by one: loss, logits and every gradient."""
    patcher, batch = ModelPatcher(), make_batch(lengths, pad_to=pad_to)
    install_packed_training(model, patcher, checkpointing=OffloadCheckpointing(policy))
    batch.context.output_logits = True
    loss, logits = run_packed(model, batch)
    gradients = take_gradients(model)
    patcher.undo()
    loss_alone, logits_alone = run_one_by_one(model, make_documents(lengths), num_items=batch.context.num_items)
    truth = take_gradients(model)
    assert gradients.keys() == truth.keys()
    found = {name: relative_error(gradients[name], truth[name]) for name in truth}
    return found | {
        "loss": relative_error(loss, loss_alone),
        "logits": relative_error(logits[: len(logits_alone)], logits_alone),
    }


def assert_exact(found):
    assert max(found.values()) <= 1e-5, max(found.items(), key=lambda item: item[1])


def test_every_described_family_has_a_tiny_model():
    tiny = {model_type for model_type, _ in HYBRIDS.values()}
    assert tiny == set(MIXERS) - MISSING, "HYBRIDS of tests/support/tiny_models.py has the families of MIXERS"


@pytest.mark.parametrize("name", HYBRIDS)
def test_packed_documents_are_computed_as_each_alone(name):
    assert_exact(errors(build_tiny(name)))


@pytest.mark.parametrize("is_before_gate", [False, True])
def test_a_norm_inside_the_mixer_is_exact_on_documents_of_one_token(is_before_gate):
    """In transformers 5.17 this norm drops the axis of tokens where there is one."""
    model = build_tiny("falcon_h1", mamba_rms_norm=True, mamba_norm_before_gate=is_before_gate)
    assert_exact(errors(model))


@pytest.mark.parametrize("name", KINDS)
def test_the_pad_tail_changes_nothing(name):
    assert_exact(errors(build_tiny(name), lengths=(5, 2, 1), pad_to=16))


@pytest.mark.covering
@pytest.mark.parametrize("policy", ["recompute", "offload"])
@pytest.mark.parametrize("name", ["lfm2", "qwen3_next", "falcon_h1", "zamba2", "jamba"])
def test_layers_that_run_again_in_the_backward_are_exact(name, policy):
    assert_exact(errors(build_tiny(name), policy=policy))


@pytest.mark.parametrize("name", ["lfm2", "jamba"])
def test_a_recompute_uses_the_pack_of_its_own_forward(name):
    """Two packs are in flight at once: the first runs again after the second went forward."""
    model, packs = build_tiny(name), [(3, 9), (8, 4)]
    install_packed_training(model, patcher := ModelPatcher(), checkpointing=OffloadCheckpointing("recompute"))
    sum(model(**make_batch(lengths)).loss for lengths in packs).backward()
    gradients = take_gradients(model)
    patcher.undo()
    for lengths in packs:
        run_one_by_one(model, make_documents(lengths), num_items=make_batch(lengths).context.num_items)
    assert_close(gradients, take_gradients(model))


@pytest.mark.covering
@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("lfm2", ["in_proj", "out_proj", "q_proj"]),
        ("qwen3_5_text", ["in_proj_qkv", "out_proj", "v_proj"]),
        ("kimi_linear", ["k_proj", "o_proj", "b_proj"]),
        ("bamba", ["in_proj", "q_proj"]),
    ],
)
@pytest.mark.parametrize("policy", ["keep", "recompute"])
def test_adapters_of_mixers_get_exact_gradients(name, targets, policy):
    model = get_peft_model(build_tiny(name), LoraConfig(r=2, target_modules=targets))
    for parameter in model.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.2)
    found = errors(model, policy=policy)
    assert any("lora_B" in key for key in found)
    assert_exact(found)


@pytest.mark.parametrize("name", HYBRIDS)
def test_every_layer_reads_the_context_once(name):
    model, batch = build_tiny(name), make_batch(LENGTHS)
    install_packed_training(model, ModelPatcher())
    model(**batch)
    assert batch.context.reads[install.BY_DOCUMENT] == len(mixers_of(model)) > 0


@pytest.mark.parametrize("name", KINDS)
def test_rows_without_a_context_run_the_model_as_it_is(name):
    model, plain = build_tiny(name).eval(), build_tiny(name).eval()
    install_packed_training(model, ModelPatcher())
    ids = torch.randint(3, VOCABULARY, (2, 12))
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    with torch.no_grad():
        for keywords in ({"attention_mask": mask}, {"use_cache": True}):
            value, truth = (each(input_ids=ids, **keywords).logits[:, -1] for each in (model, plain))
            assert_close(value, truth)
        assert torch.equal(*(each.generate(ids[1:], max_new_tokens=3, do_sample=False) for each in (model, plain)))


@pytest.mark.parametrize("name", HYBRIDS)
def test_undo_leaves_the_model_as_it_was(name):
    model, patcher = build_tiny(name), ModelPatcher()
    before = [{key: copy.copy(value) for key, value in vars(module).items()} for module in model.modules()]
    statuses = install_packed_training(model, patcher, checkpointing=OffloadCheckpointing("recompute")).statuses
    assert [status.state for status in statuses if status.name == "mixers"] == ["active"]
    model(**make_batch(LENGTHS)).loss.backward()
    model.zero_grad(set_to_none=True)
    patcher.undo()
    assert [vars(module) for module in model.modules()] == before


def test_an_installed_model_can_be_copied_and_pickled():
    model, batch = build_tiny("lfm2"), make_batch(LENGTHS)
    install_mixers(model, ModelPatcher())
    install_packed_training(model, ModelPatcher())
    truth = model(**batch).loss
    assert torch.equal(copy.deepcopy(model)(**batch).loss, truth)
    assert torch.equal(pickle.loads(pickle.dumps(model))(**batch).loss, truth)


@pytest.mark.parametrize("name", ["lfm2", "falcon_h1"])
def test_mixers_add_no_host_sync(name):
    model, batch = build_tiny(name), make_batch(LENGTHS)
    install_packed_training(model, ModelPatcher())
    with count_host_waits() as waits:
        model(**batch).loss.backward()
    assert waits.total == 0, waits.origin


def carry_state(mixer, hidden_states):
    """The mixer's own forward on the whole pack."""
    return type(mixer).forward(mixer, hidden_states, attention_mask=None)


def look_one_back(mixer, hidden_states, context):
    """Each document with the token before it, so that the window of a convolution begins outside."""
    outputs, begin = [], 0
    for length in context.lengths:
        first = max(begin - 1, 0)
        part = hidden_states[:, first : begin + length]
        outputs.append(type(mixer).forward(mixer, part)[:, begin - first :])
        begin += length
    return torch.cat(outputs, dim=1)


@pytest.mark.covering
@pytest.mark.parametrize("fault", ["state", "window"])
@pytest.mark.parametrize("name", HYBRIDS)
def test_a_planted_leak_is_found(name, fault, monkeypatch):
    def run_mixer(mixer, family, hidden_states, **keywords):
        context, _ = install._take_context(keywords)
        if context is None:
            return type(mixer).forward(mixer, hidden_states, **keywords)
        context.note_read("planted")
        return carry_state(mixer, hidden_states) if fault == "state" else look_one_back(mixer, hidden_states, context)

    monkeypatch.setattr(install, "run_mixer", run_mixer)
    found = errors(build_tiny(name))
    assert found["logits"] > 1e-3
    assert max(found.values()) > 1e-2


@pytest.mark.parametrize("name", ["qwen3_next", "granitemoehybrid", "falcon_h1"])
def test_a_mixer_that_does_not_read_is_refused(name):
    model = build_tiny(name)
    install_packed_training(model, ModelPatcher())
    del mixers_of(model)[0].forward
    with pytest.raises(UnsupportedModelError, match="attention layers and mixers"):
        model(**make_batch(LENGTHS))


@pytest.mark.parametrize("name", ["lfm2", "jamba"])
@pytest.mark.parametrize("has_convolution", [False, True])
def test_an_unknown_mixer_in_a_known_family_is_refused_by_name(name, has_convolution):
    class MyMambaMixer(nn.Module):
        pass

    model = build_tiny(name)
    model.model.layers[1].mixer = nn.Conv1d(4, 4, 3) if has_convolution else MyMambaMixer()
    with pytest.raises(UnsupportedModelError, match="Conv1d" if has_convolution else "MyMambaMixer"):
        install_packed_training(model, patcher := ModelPatcher())
    assert len(patcher) == 0


def test_a_replaced_forward_is_refused():
    model = build_tiny("lfm2")
    mixers_of(model)[0].forward = lambda hidden_states, **keywords: hidden_states
    with pytest.raises(UnsupportedModelError, match="replaced"):
        install_mixers(model, ModelPatcher())


@pytest.mark.parametrize(
    ("shape", "keywords", "error"),
    [
        ((2, 31, 32), {}, ShapeError),
        ((1, 30, 32), {}, ShapeError),
        *(((1, 31, 32), {name: object()}, ShapeError) for name in ("cache", "past_key_values", "cache_params")),
        ((1, 31, 32), {"seq_idx": torch.zeros(1, 31)}, BackendError),
    ],
)
def test_calls_that_would_not_be_exact_are_refused(shape, keywords, error):
    model = build_tiny("lfm2")
    install_mixers(model, ModelPatcher())
    with pytest.raises(error):
        mixers_of(model)[0](hidden_states=torch.zeros(shape), context=make_batch(LENGTHS).context, **keywords)


def test_per_token_keywords_are_split_with_the_hidden_states():
    model, context = build_tiny("lfm2"), make_batch((3, 2)).context
    install_mixers(model, ModelPatcher())
    mixer, x = mixers_of(model)[0], torch.randn(1, 5, 32)
    mask = torch.tensor([[1, 0, 1, 1, 0]])
    mixer.requires_grad_(False)
    value = mixer(hidden_states=x, attention_mask=mask, context=context)
    assert_close(value[:, 3:], mixer(hidden_states=x[:, 3:], attention_mask=mask[:, 3:]))
    assert_close(value[:, :3], mixer(hidden_states=x[:, :3], attention_mask=mask[:, :3]))


def test_models_without_mixers_are_left_alone():
    assert install_mixers(build_tiny("llama"), patcher := ModelPatcher()) == []
    assert len(patcher) == 0


@pytest.mark.parametrize(
    ("name", "options"),
    [("qwen3_next", {}), ("lfm2", {"layer_types": ["conv", "conv"]})],
    ids=["hybrid", "no attention"],
)
def test_a_hybrid_trains_under_the_strategy(name, options, tmp_path):
    module = PlainModule(build_tiny(name, **options))
    before = {name: value.clone() for name, value in module.state_dict().items()}
    strategy = FastFTStrategy(activations=OffloadCheckpointing("recompute"))
    trainer = quiet_trainer(
        tmp_path, strategy=strategy, max_steps=3, callbacks=[BincountRouter(), FusedKernels()], gradient_clip_val=None
    )
    trainer.fit(module, packed_loader(3))
    assert trainer.global_step == 3
    assert install.BY_DOCUMENT in strategy.packed_steps.backends_used
    after = module.state_dict()
    assert all(not torch.equal(before[key], after[key]) for key in before if ".conv" in key)
    assert not any("forward" in vars(mixer) for mixer in mixers_of(module.model))


def test_kernels_multiply_fp32_in_fp32_until_the_change_is_undone(monkeypatch):
    """No GPU is needed: what Triton reads when it compiles is set, and put back."""
    monkeypatch.setattr(install, "find_kernels", lambda family, **_: dict.fromkeys(["any"]))
    monkeypatch.setattr(install, "check_calls", lambda kind, functions: None)
    monkeypatch.setenv("TRITON_F32_DEFAULT", "ieee")
    for dtype, expected in ((torch.float32, "tf32x3"), (torch.bfloat16, "ieee")):
        model = build_tiny("qwen3_5_text").to(dtype)
        with monkeypatch.context() as on_gpu:
            on_gpu.setattr(torch.Tensor, "is_cuda", True, raising=False)
            install_mixers(model, patcher := ModelPatcher())
        assert os.environ["TRITON_F32_DEFAULT"] == expected
        patcher.undo()
        assert os.environ["TRITON_F32_DEFAULT"] == "ieee"
