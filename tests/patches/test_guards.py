"""What packed batches are not for is refused in words, and every layer of a served model reads the context."""

import pytest
import torch
from peft import (
    LoraConfig,
    PrefixTuningConfig,
    PromptEncoderConfig,
    PromptTuningConfig,
    TaskType,
    get_peft_model,
)
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForImageTextToText,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    LlamaForSequenceClassification,
)

from lightning_fastft.activations.checkpointing import OffloadCheckpointing
from lightning_fastft.core.errors import BackendError, UnsupportedModelError
from lightning_fastft.core.patcher import ModelPatcher
from lightning_fastft.hf import families
from lightning_fastft.patches.attention import register
from lightning_fastft.patches.packed import install_packed_training
from tests.support.packs import make_batch
from tests.support.sizes import sizes
from tests.support.tiny_models import VOCABULARY, build_tiny
from tests.support.truth import Watch

SIZES = sizes(vocab=VOCABULARY, width=32, inner=40, layers=2, heads=4, key_heads=2, pad_token_id=0)


# One image of four patches.
MEDIA = {"pixel_values": torch.zeros(4, 3 * 2 * 14 * 14), "image_grid_thw": torch.tensor([[1, 2, 2]])}


def tiny_config(**more):
    return AutoConfig.for_model("llama", **SIZES, **more)


@pytest.mark.parametrize("is_adapted", [False, True])
def test_a_classifier_refuses_a_packed_batch_and_takes_its_own(is_adapted):
    model = AutoModelForSequenceClassification.from_config(tiny_config())
    if is_adapted:
        model = get_peft_model(model, LoraConfig(r=2, task_type=TaskType.SEQ_CLS, target_modules=["q_proj"]))
    install_packed_training(nn.ModuleDict({"model": model}), patcher := ModelPatcher())
    with pytest.raises(UnsupportedModelError, match="ForSequenceClassification"):
        model(**make_batch())
    rows = torch.randint(3, VOCABULARY, (2, 6))
    assert model(input_ids=rows, labels=torch.tensor([0, 1])).loss.isfinite()
    patcher.undo()
    assert not any(module._forward_pre_hooks for module in model.modules())


class DropsKeywords(LlamaForSequenceClassification):
    def forward(self, input_ids, **keywords):
        return super().forward(input_ids=input_ids)


@pytest.mark.parametrize("call", ["forward without the model's hooks", "no keyword reaches the decoder"])
def test_a_classifier_refuses_a_packed_batch_by_either_of_its_two_hooks(call):
    model = DropsKeywords(tiny_config()) if "keyword" in call else LlamaForSequenceClassification(tiny_config())
    install_packed_training(model, ModelPatcher())
    with pytest.raises(UnsupportedModelError, match="packed batch"):
        (model if "keyword" in call else model.forward)(**make_batch())


def test_an_encoder_decoder_refuses_a_packed_batch():
    model = AutoModelForSeq2SeqLM.from_config(
        AutoConfig.for_model(
            "t5",
            vocab_size=VOCABULARY,
            d_model=16,
            d_kv=8,
            d_ff=16,
            num_layers=1,
            num_heads=2,
            decoder_start_token_id=0,
        )
    )
    install_packed_training(model, ModelPatcher())
    with pytest.raises(UnsupportedModelError, match="T5ForConditionalGeneration"):
        model(**make_batch())


def test_a_decoder_without_a_head_that_reads_the_context_is_left_alone():
    register()
    model = AutoModel.from_config(tiny_config(), attn_implementation="fastft")
    install_packed_training(model, ModelPatcher())
    batch = make_batch()
    model(**batch)
    assert batch.context.num_reads == 2


def test_a_layer_that_does_not_read_the_context_is_refused():
    class Plain(nn.Module):
        def forward(self, hidden_states, **keywords):
            return hidden_states, None

    model = build_tiny("llama")
    model.model.layers[1].self_attn = Plain()
    install_packed_training(model, patcher := ModelPatcher())
    with pytest.raises(UnsupportedModelError, match="1 of 2 decoder layers"):
        model(**make_batch())
    patcher.undo()
    assert not model.model._forward_hooks


def test_a_hybrid_is_refused_by_its_reads_even_without_the_gate_by_name(monkeypatch):
    config = AutoConfig.for_model("minimax", **SIZES, head_dim=8, layer_types=["linear_attention", "full_attention"])
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(config)
    monkeypatch.setattr(families, "_find_obstacle", lambda model: "")
    install_packed_training(model, ModelPatcher())
    with pytest.raises(UnsupportedModelError, match="1 of 2 decoder layers"):
        # The mask refuses such a mixer by itself.
        model(**{**make_batch(), "attention_mask": None})


def tiny_qwen2_vl():
    vision = {"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2, "patch_size": 14}
    text = {**SIZES, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}}
    config = AutoConfig.for_model(
        "qwen2_vl",
        text_config=text,
        vision_config=vision,
        image_token_id=90,
        video_token_id=91,
        vision_start_token_id=92,
    )
    torch.manual_seed(0)
    return AutoModelForImageTextToText.from_config(config)


def test_images_of_gemma_3_without_spans_are_refused_and_text_alone_is_served():
    text = {**SIZES, "query_pre_attn_scalar": 8}
    tower = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = AutoConfig.for_model(
        "gemma3", text_config=text, vision_config={**tower, "image_size": 28, "patch_size": 14}, image_token_index=90
    )
    model = AutoModelForImageTextToText.from_config(config)
    install_packed_training(model, ModelPatcher())
    batch = make_batch()
    model(**batch).loss.backward()
    with pytest.raises(UnsupportedModelError, match="PackedDataModule"):
        model(**batch, pixel_values=torch.zeros(1, 3, 28, 28))


@pytest.mark.parametrize("is_adapted", [False, True])
def test_images_under_mrope_are_refused_and_text_alone_is_served(is_adapted):
    model = tiny_qwen2_vl()
    if is_adapted:
        model = get_peft_model(model, LoraConfig(r=2, task_type=TaskType.CAUSAL_LM, target_modules=["q_proj"]))
    install_packed_training(model, ModelPatcher())
    batch = make_batch()
    model(**batch).loss.backward()
    assert batch.context.num_reads == 2
    with pytest.raises(UnsupportedModelError, match="pixel_values"):
        model(**batch, **MEDIA)


@pytest.mark.parametrize("sign", ["sections of the rotary embedding", "positions of the model's own"])
def test_either_sign_of_mrope_refuses_images_with_positions_of_text(sign):
    if sign.startswith("sections"):
        rotary = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
        model = build_tiny("llama", rope_parameters=rotary)
    else:
        model = tiny_qwen2_vl()
        del model.config.text_config.rope_parameters["mrope_section"]
    install_packed_training(model, ModelPatcher())
    with pytest.raises(UnsupportedModelError, match="M-RoPE"):
        model(**make_batch(), **MEDIA)


def test_videos_are_refused_with_positions_of_images_too():
    model = tiny_qwen2_vl()
    install_packed_training(model, ModelPatcher())
    batch = {**make_batch(), "position_ids": torch.arange(29).expand(3, 1, 29)}
    with pytest.raises(UnsupportedModelError, match="got pixel_values_videos, video_grid_thw with"):
        model(**batch, **MEDIA, pixel_values_videos=MEDIA["pixel_values"], video_grid_thw=MEDIA["image_grid_thw"])


# The text part of Qwen3.5 has M-RoPE, too.
@pytest.mark.parametrize("name", ["llama", "qwen3_5_text"])
@pytest.mark.parametrize("is_adapted", [False, True])
def test_a_model_of_text_refuses_images_which_it_would_drop(is_adapted, name):
    model, batch = build_tiny(name), make_batch()
    if is_adapted:
        model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
    install_packed_training(model, patcher := ModelPatcher())
    assert model(**make_batch(), pixel_values=None).loss.isfinite()
    with pytest.raises(UnsupportedModelError, match="no image tower"):
        model(**{**batch, "position_ids": batch["position_ids"].expand(3, 1, -1), **MEDIA})
    patcher.undo()
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_images_without_a_packed_batch_are_served():
    model = tiny_qwen2_vl()
    install_packed_training(model, ModelPatcher())
    row = torch.tensor([[5, 92, 90, 6, 7]])
    assert model(input_ids=row, labels=row, mm_token_type_ids=(row == 90).int(), **MEDIA).loss.isfinite()


@pytest.mark.parametrize("attention", ["auto", "one_by_one", "loaded with it"])
def test_a_mask_of_the_callers_own_that_hides_a_token_is_refused(attention):
    is_loaded = attention == "loaded with it"
    register()
    model, batch = build_tiny("llama", attention="fastft" if is_loaded else "eager"), make_batch(pad_to=40)
    if not is_loaded:
        install_packed_training(model, ModelPatcher(), attention=attention)
    keywords = dict(batch.items())
    mask = torch.ones_like(batch["input_ids"])
    mask[0, batch.context.num_real_tokens :] = 0
    loss = model(**{**keywords, "attention_mask": mask}).loss
    assert torch.equal(loss, model(**batch).loss)
    mask[0, 3] = 0
    with pytest.raises(BackendError, match="attention_mask hides tokens"):
        model(**{**keywords, "attention_mask": mask})
    assert model(input_ids=batch["input_ids"], attention_mask=mask).logits.isfinite().all()


@pytest.mark.parametrize("lengths", [(9,), (5, 4)])
def test_the_mask_of_the_batch_is_not_read(lengths):
    model, batch = build_tiny("llama"), make_batch(lengths, pad_to=16)
    install_packed_training(model, ModelPatcher())
    with Watch() as watch:
        model(**batch).loss.backward()
    assert watch.waits == []


@pytest.mark.parametrize("kind", [PromptTuningConfig, PrefixTuningConfig, PromptEncoderConfig])
@pytest.mark.parametrize("attention", ["auto", "one_by_one"])
def test_soft_prompts_refuse_packed_batches(kind, attention):
    """Under an activation policy transformers drops the prefix of prefix tuning, so another weight could train alone."""
    more = {"encoder_hidden_size": 8} if kind is PromptEncoderConfig else {}
    model = get_peft_model(build_tiny("llama"), kind(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=3, **more))
    model.get_base_model().lm_head.requires_grad_(True)
    install_packed_training(model.train(), ModelPatcher(), checkpointing=OffloadCheckpointing(), attention=attention)
    batch = make_batch()
    with pytest.raises(UnsupportedModelError, match=kind.__name__):
        model(**batch)
    if attention == "auto":
        assert model.eval()(input_ids=batch["input_ids"][:, :5]).logits.isfinite().all()
    with model.disable_adapter():
        assert model(**batch).loss.isfinite()
