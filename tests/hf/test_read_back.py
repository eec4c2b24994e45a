"""Saved adapters are read back by stock PEFT before they take their place; what vLLM ignores is refused by name."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from benchmarks.model_types import build_model
from lightning_fastft.core.errors import CheckpointNotSavedError, UnsupportedModelError
from lightning_fastft.hf import export
from lightning_fastft.hf.lora import add_adapters
from lightning_fastft.hf.read_back import check_for_vllm, check_read_back
from lightning_fastft.training.fine_tuner import FineTuner
from tests.hf.loading.test_model import random_model
from tests.support.fine_tuners import CONFIG as TIED
from tests.support.tiny_models import build_tiny

STACKS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def adapted(name="llama", **lora):
    return add_adapters(
        build_tiny(name), lora=LoraConfig(r=2, init_lora_weights=False, **lora), adapter_dtype=torch.float32
    )


@pytest.mark.parametrize(
    ("name", "lora"),
    [
        ("llama", {}),
        ("mixtral", {"target_parameters": STACKS, "target_modules": ["q_proj"]}),
        ("qwen3_next", {"rank_pattern": {"q_proj": 4}, "use_rslora": True}),
        ("qwen2", {"bias": "lora_only"}),
        ("qwen2", {"bias": "all", "target_modules": ["o_proj"]}),
    ],
)
def test_what_is_saved_reads_back(name, lora, tmp_path):
    model = adapted(name, **lora)
    export.save_adapters(model, tmp_path / "out")
    assert check_read_back(model, tmp_path / "out") == sum(value.requires_grad for value in model.parameters())


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")
def test_an_adapter_of_a_tied_head_with_trained_tokens_reads_back(tmp_path):
    # PEFT finds the layers of a tied weight by the weight itself.
    lora = LoraConfig(r=2, target_modules=["q_proj", "lm_head"], trainable_token_indices={"embed_tokens": [3, 5]})
    model = add_adapters(random_model(TIED), lora=lora, adapter_dtype=torch.float32)
    export.save_adapters(model, tmp_path / "out")
    assert check_read_back(model, tmp_path / "out") == sum(value.requires_grad for value in model.parameters())


@pytest.mark.parametrize("idle", ["x", "lora"])
def test_the_trained_adapter_is_saved_whatever_the_others_are_called(idle, tmp_path):
    lora = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    model = get_peft_model(build_tiny("llama"), lora, adapter_name=idle)
    model.add_adapter("x2", lora)
    model.set_adapter("x2")
    export.save_adapters(model, tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir() if path.is_dir()] == ["x2"]


@pytest.mark.parametrize("fault", ["value", "name", "scale", "bias"])
def test_another_value_name_or_scale_is_seen(fault, tmp_path):
    model = adapted("qwen2", bias="lora_only") if fault == "bias" else adapted()
    model.save_pretrained(str(tmp_path))
    file = tmp_path / "adapter_model.safetensors"
    tensors = load_file(file)
    name = sorted(name for name in tensors if ("bias" in name) == (fault == "bias"))[3]
    if fault == "scale":
        config = tmp_path / "adapter_config.json"
        config.write_text(config.read_text().replace('"lora_alpha": 8', '"lora_alpha": 9'))
    else:
        tensor = tensors.pop(name)
        tensors[name.replace("layers.0", "layers.1.x") if fault == "name" else name] = tensor + (fault != "name")
        save_file(tensors, file)
    with pytest.raises(CheckpointNotSavedError, match="reads other values"):
        check_read_back(model, tmp_path)


def test_a_save_that_reads_back_otherwise_leaves_the_folder_as_it_was(tmp_path, monkeypatch):
    tuner = FineTuner(build_tiny("llama"), lora={"r": 2})
    tuner.configure_model()
    tuner.save_pretrained(str(tmp_path / "out"))
    before = {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}
    with torch.no_grad():
        next(value for value in tuner.parameters() if value.requires_grad).add_(1.0)

    def lose(model, part, **options):
        tensors = load_file(part / "adapter_model.safetensors")
        tensors.popitem()
        save_file(tensors, part / "adapter_model.safetensors")
        return check_read_back(model, part, **options)

    monkeypatch.setattr(export, "check_read_back", lose)
    with pytest.raises(CheckpointNotSavedError):
        tuner.save_pretrained(str(tmp_path / "out"))
    assert before == {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_default_adapters_of_laguna_read_back(tmp_path):
    """PEFT would lose adapters of its shared experts, which the default rule therefore skips."""
    tuner = FineTuner(build_model("laguna"), lora={"r": 2})
    tuner.configure_model()
    tuner.save_pretrained(str(tmp_path / "out"))
    assert (tmp_path / "out" / "adapter_model.safetensors").is_file()


@pytest.mark.parametrize(
    ("name", "lora", "told"),
    [
        ("llama", {"use_dora": True}, "use_dora"),
        ("llama", {"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ("llama", {"bias": "lora_only"}, "bias='lora_only'"),
        ("llama", {"lora_bias": True}, "lora_bias"),
        ("llama", {"rank_pattern": {"q_proj": 4}}, "rank_pattern"),
        ("llama", {"alpha_pattern": {"q_proj": 4}}, "alpha_pattern"),
        ("llama", {"target_modules": r".*\.q_proj"}, "not a list of names"),
        ("mixtral", {"target_parameters": STACKS, "target_modules": ["q_proj"]}, "target_parameters"),
    ],
)
def test_what_vllm_would_ignore_is_refused_by_name(name, lora, told):
    with pytest.raises(UnsupportedModelError, match="vLLM would not read all") as refusal:
        check_for_vllm(adapted(name, **lora))
    assert told in str(refusal.value)


def test_plain_adapters_are_fit_for_vllm_and_the_rank_is_told():
    assert check_for_vllm(adapted()) == 8
    assert check_for_vllm(adapted("mixtral", use_rslora=True)) == 8
