"""Default LoRA on mixtures of experts: every family follows one of the two forms that docs/support.md describes."""

from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from benchmarks.model_types import ALTERNATIVES, build_config
from lightning_fastft.hf.lora import add_adapters
from tests.support.tiny_models import build_tiny

SUPPORT = Path(__file__).parents[2] / "docs" / "support.md"
# PEFT takes these names of linear layers for parts of a stack, wherever in the model they are.
EXPERT_NAMES = ("gate_proj", "up_proj", "down_proj", "gate")
NUM_EXPERTS_NAMES = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
# Types that no default configuration builds tiny.
NOT_BUILT = {"dots3_note", "granitemoehybrid", "zaya"}


def is_mixture(model_type):
    try:
        config = CONFIG_MAPPING[model_type]()
    # What a foreign configuration raises without arguments says nothing of its experts.
    except Exception:  # noqa: BLE001
        return False
    text = config.get_text_config(decoder=True)
    return any(getattr(text, name, None) for name in NUM_EXPERTS_NAMES)


MIXTURES = sorted(filter(is_mixture, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))


def build(model_type):
    for changes in ALTERNATIVES:
        try:
            return AutoModelForCausalLM.from_config(build_config(model_type, changes))
        # Sizes that do not fit a foreign model: the next ones may.
        except Exception:  # noqa: BLE001
            continue
    return None


def form_of(model):
    """Return "experts" or "linear" of what default LoRA adapts, after judging that it is all of that form."""
    stacks = {
        name.rpartition(".")[0] for name, param in model.named_parameters() if ".experts." in name and param.ndim == 3
    }
    text = {id(module) for module in model.get_decoder().modules()}
    linear = {
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
        and id(module) in text
        and module is not model.get_output_embeddings()
        and not name.endswith((".mamba.out_proj", ".mixer.out_proj"))
        and "Router" not in type(module).__name__
    }
    adapted = add_adapters(model, lora=LoraConfig(r=2), adapter_dtype=torch.float32)
    found = {
        name.removeprefix("base_model.model.").split(".lora_")[0].replace(".base_layer", "")
        for name, param in adapted.named_parameters()
        if param.requires_grad
    }
    missing = linear - found
    if not missing and not found & stacks:
        assert found == linear
        return "linear"
    # Also where a family of such checkpoints is dense (beam): it has no stacks, and loses the names.
    assert stacks <= found
    assert {name.rpartition(".")[2] for name in missing} <= set(EXPERT_NAMES)
    return "experts"


def documented():
    """Return the form that docs/support.md gives for each of its mixtures."""
    section = SUPPORT.read_text().split("## Default LoRA on mixtures")[1].split("\n## ")[0]
    rows = [row.split("|")[1:3] for row in section.splitlines() if row.startswith("| `")]
    return {family.strip().strip("`"): form.strip() for family, form in rows}


@pytest.mark.parametrize("model_type", MIXTURES)
def test_default_lora_of_a_mixture_has_a_documented_form(model_type):
    model = build(model_type)
    assert (model is None) == (model_type in NOT_BUILT)
    if model is None:
        return
    form = form_of(model)
    assert documented().get(model_type, form) == form


def test_documented_mixtures_exist():
    # An older transformers has fewer.
    assert {name for name in documented() if name in CONFIG_MAPPING} <= set(MIXTURES)
    assert set(documented().values()) == {"experts", "linear"}


@pytest.mark.parametrize("name", ["nemotron_h_hybrid", "falcon_h1", "jamba"])
def test_output_projections_of_mamba_mixers_get_no_default_adapter(name):
    adapted = add_adapters(build_tiny(name), lora=LoraConfig(r=2), adapter_dtype=torch.float32)
    trained = {key.split(".lora_")[0].rpartition(".")[2] for key, _ in adapted.named_parameters() if ".lora_A" in key}
    assert {"in_proj", "o_proj"} <= trained
    assert "out_proj" not in trained
