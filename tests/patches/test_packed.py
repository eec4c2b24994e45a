"""install_packed_training: every transformers model inside a module, wherever it stands, and all of it undone."""

import copy
from itertools import pairwise

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from lightning_fastft.activations.checkpointing import OffloadCheckpointing
from lightning_fastft.core.errors import UnsupportedModelError
from lightning_fastft.core.patcher import ModelPatcher
from lightning_fastft.core.status import Status
from lightning_fastft.patches.packed import describe_models, install_packed_training
from tests.support.tiny_models import build_tiny
from tests.support.training_parts import VOCAB_SIZE, packed_batches, tiny_llama


def test_peft_model_inside_a_module_is_served_and_restored():
    root = nn.ModuleDict({"policy": get_peft_model(tiny_llama(), LoraConfig(r=4, target_modules="all-linear"))})
    keys, patcher = list(root.state_dict()), ModelPatcher()
    installation = install_packed_training(root, patcher, checkpointing=OffloadCheckpointing("recompute"))
    assert [status.state for status in installation.statuses] == ["active"] * 3
    assert len(installation.layers) == 2
    assert list(root.state_dict()) == keys
    batch = packed_batches(1)[0]
    root["policy"](**batch).loss.backward()
    assert batch.context.num_reads == 4
    patcher.undo()
    assert "eager" in describe_models(root)[0] or "sdpa" in describe_models(root)[0]
    assert not root["policy"].get_base_model().is_gradient_checkpointing


@pytest.mark.parametrize("attention", ["auto", "one_by_one"])
def test_adapters_that_wait_for_tokens_in_a_row_are_refused(attention):
    lora = LoraConfig(r=4, target_modules=["q_proj"], alora_invocation_tokens=[3], task_type="CAUSAL_LM")
    with pytest.raises(UnsupportedModelError, match="q_proj has an adapter with alora_invocation_tokens"):
        install_packed_training(get_peft_model(tiny_llama(), lora), ModelPatcher(), attention=attention)


def test_two_models_in_one_module_are_both_served_and_told_apart():
    root = nn.ModuleDict({"student": tiny_llama(), "teacher": tiny_llama()})
    statuses = install_packed_training(root, ModelPatcher()).statuses
    assert [status.name for status in statuses if status.name.startswith("packed")] == [
        "packed attention (student)",
        "packed attention (teacher)",
    ]


def test_packed_loss_equals_the_plain_model_on_each_document():
    model = tiny_llama()
    plain = copy.deepcopy(model)
    install_packed_training(model, ModelPatcher())
    batch = packed_batches(1)[0]
    offsets = batch.context.start_host_S1.tolist()
    expected = sum(
        plain(
            input_ids=batch["input_ids"][:, a:b],
            labels=batch["labels"][:, a:b],
            num_items_in_batch=batch.context.num_items,
        ).loss
        for a, b in pairwise(offsets)
    )
    assert torch.allclose(model(**batch).loss, expected, rtol=1e-6)


def test_module_without_a_model_is_left_alone_and_says_so():
    root = nn.Linear(2, 2)
    installation = install_packed_training(root, patcher := ModelPatcher(), checkpointing=OffloadCheckpointing())
    assert {status.state for status in installation.statuses} == {"inactive"}
    assert "Linear holds no transformers model" in installation.statuses[0].reason
    assert len(patcher) == 0


def test_nothing_is_changed_when_one_model_cannot_be_served():
    from transformers import MambaConfig, MambaForCausalLM

    mamba = MambaForCausalLM(MambaConfig(vocab_size=VOCAB_SIZE, hidden_size=16, num_hidden_layers=1, state_size=4))
    root = nn.ModuleDict({"good": tiny_llama(), "bad": mamba})
    with pytest.raises(UnsupportedModelError):
        install_packed_training(root, patcher := ModelPatcher())
    assert len(patcher) == 0


def test_without_a_plugin_the_models_own_checkpointing_stays():
    model = tiny_llama()
    model.gradient_checkpointing_enable()
    install_packed_training(model, ModelPatcher())
    assert model.is_gradient_checkpointing


@pytest.mark.parametrize("is_tied", [False, True])
def test_sizes_outside_of_the_layers(is_tied):
    model = build_tiny("llama", tie_word_embeddings=is_tied)
    checkpointing = OffloadCheckpointing("auto", vram_budget=1.0)
    seen = {}
    checkpointing.attach = lambda *_args, **options: seen.update(options) or Status("activations", "active", "")
    output = model.lm_head.weight
    for is_trained in (True, False):
        output.requires_grad_(is_trained)
        patcher = ModelPatcher()
        install_packed_training(model, patcher, checkpointing=checkpointing)
        patcher.undo()
        trained = {id(model.model.norm.weight)} | ({id(output)} if is_trained else set())
        assert {id(item) for item in seen["head"].trained} == trained
        assert seen["head"].sum_bytes == (4 * output.numel() if is_trained else 0)
        assert seen["head"].vocab_size == output.shape[0]


def test_nf4_weights_have_a_backward_after_an_evaluation(tmp_path):
    options = {"quantization_config": BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")}
    tiny_llama().save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16, **options)
    layers = [layer for layer in model.modules() if hasattr(layer, "support_avx512bf16_for_cpu")]
    for layer in layers:
        layer.support_avx512bf16_for_cpu = True
    patcher = ModelPatcher()
    install_packed_training(model, patcher)
    batch = packed_batches(1)[0]
    with torch.no_grad():
        model.eval()(**batch)
    values = {name: batch[name] for name in batch.keys() if name != "input_ids"}  # noqa: SIM118
    embeddings = model.get_input_embeddings()(batch["input_ids"]).detach().requires_grad_()
    model.train()(inputs_embeds=embeddings, **values).loss.backward()
    assert float(embeddings.grad.norm()) > 0
    patcher.undo()
    assert layers
    assert all(layer.support_avx512bf16_for_cpu for layer in layers)
