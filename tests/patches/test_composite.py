"""Models with an image tower, given to FineTuner as a folder: read, adapted and trained on text."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from lightning_fastft.core.errors import OptionError
from lightning_fastft.hf.loading.source import auto_class
from lightning_fastft.hf.lora import add_adapters, parse_lora
from lightning_fastft.training.fine_tuner import FineTuner
from tests.support.packs import make_batch
from tests.support.sizes import sizes
from tests.support.tiny_models import VOCABULARY, build_tiny
from tests.support.training_parts import quiet_trainer

TEXT = sizes(
    vocab=VOCABULARY,
    width=32,
    inner=40,
    layers=2,
    heads=4,
    key_heads=2,
    head_width=8,
    positions=128,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
VISION = sizes(width=32, inner=40, layers=1, heads=2, image_size=28, patch_size=14)
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
QWEN_TOWER = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_heads": 2,
    "out_hidden_size": 32,
    "deepstack_visual_indexes": [0],
}
COMPOSITES = {
    "mistral3": {
        "text_config": {"model_type": "mistral", **TEXT},
        "vision_config": {"model_type": "pixtral", **VISION},
        "image_token_index": 90,
    },
    "llava": {
        "text_config": {"model_type": "llama", **TEXT},
        "vision_config": {"model_type": "clip_vision_model", **VISION},
        "image_token_index": 90,
    },
    "qwen2_5_vl": {
        "text_config": {**TEXT, "rope_parameters": MROPE},
        "vision_config": {
            "depth": 1,
            "hidden_size": 32,
            "intermediate_size": 40,
            "num_heads": 2,
            "out_hidden_size": 32,
            "fullatt_block_indexes": [0],
        },
        "image_token_id": 90,
    },
    "qwen3_vl": {"text_config": {**TEXT, "rope_parameters": MROPE}, "vision_config": QWEN_TOWER, "image_token_id": 90},
    "qwen3_5": {
        "text_config": {
            **TEXT,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_value_heads": 2,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
        },
        "vision_config": QWEN_TOWER,
        "image_token_id": 90,
    },
    "internvl": {
        "text_config": {"model_type": "qwen2", **TEXT},
        "vision_config": {"model_type": "internvl_vision", **VISION, "image_size": [28, 28], "patch_size": [14, 14]},
        "image_token_id": 90,
    },
    "gemma4": {
        "text_config": {**TEXT, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY},
        "vision_config": {**VISION, "head_dim": 16},
        "audio_config": None,
        "image_token_id": 90,
    },
    "gemma3": {
        "text_config": {**TEXT, "query_pre_attn_scalar": 8},
        "vision_config": VISION,
        "mm_tokens_per_image": 4,
        "image_token_index": 90,
    },
}


@pytest.fixture(scope="module", params=COMPOSITES)
def folder(request, tmp_path_factory):
    torch.manual_seed(0)
    config = AutoConfig.for_model(request.param, **COMPOSITES[request.param])
    path = tmp_path_factory.mktemp(request.param)
    AutoModelForImageTextToText.from_config(config).save_pretrained(path)
    return path


def test_a_folder_with_an_image_tower_trains_its_text_part(folder, tmp_path):
    tuner = FineTuner(str(folder), lora={"r": 2}, learning_rate=1e-2)
    trainer = quiet_trainer(tmp_path, strategy="fastft", max_steps=2)
    trainer.fit(tuner, torch.utils.data.DataLoader([make_batch(seed=seed) for seed in range(2)], batch_size=None))
    trained = {name: parameter for name, parameter in tuner.model.named_parameters() if parameter.requires_grad}
    assert trained
    assert not [name for name in trained if "vision" in name or "projector" in name]
    assert all(parameter.abs().sum() > 0 for name, parameter in trained.items() if "lora_B" in name)


def test_default_adapters_leave_out_a_router_that_is_no_plain_linear_layer():
    model = add_adapters(build_tiny("phimoe"), lora=parse_lora({"r": 2}), adapter_dtype=torch.float32)
    model(input_ids=torch.randint(3, VOCABULARY, (1, 6)), labels=torch.randint(3, VOCABULARY, (1, 6))).loss.backward()
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert any("q_proj" in name for name in names)
    assert not any("router" in name for name in names)


def test_a_configuration_without_a_language_model_is_refused_by_name():
    with pytest.raises(OptionError, match="'resnet'"):
        auto_class(AutoConfig.for_model("resnet"))
