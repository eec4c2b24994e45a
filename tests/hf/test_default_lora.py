"""Default LoRA follows one rule in every family: projections, never routers, experts only when asked."""

import re

import pytest
import torch
from peft import LoraConfig
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from benchmarks.model_types import ALTERNATIVES, build_config
from lightning_fastft.core.errors import OptionError, ResumeError
from lightning_fastft.hf.export import save_adapters
from lightning_fastft.hf.lora import add_adapters
from lightning_fastft.hf.lora_targets import describe_adapters, find_default_targets, find_lost_names, shorten
from lightning_fastft.training.fine_tuner import FineTuner
from tests.support.packs import make_batch
from tests.support.tiny_models import HYBRIDS, MOE, MORE_MOE, build_tiny

NUM_EXPERTS_NAMES = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
# A type that no default configuration builds tiny.
NOT_BUILT = {"dots3_note"}
NEVER = re.compile(r"router|\.experts\b|expert_gate|indexer|\.gate\b|\.wg\b|conv1d|lm_head")
# In families whose checkpoints hold experts one by one, PEFT takes these names for parts of expert stacks.
EXPERT_NAMES = {"gate_proj", "up_proj", "down_proj", "gate", "w1", "w2", "w3"}


def is_mixture(model_type):
    try:
        config = CONFIG_MAPPING[model_type]()
    # What a foreign configuration raises without arguments says nothing of its experts.
    except Exception:  # noqa: BLE001
        return False
    text = config.get_text_config(decoder=True)
    return any(getattr(text, name, None) for name in NUM_EXPERTS_NAMES)


def build(model_type):
    with torch.device("meta"):
        for changes in ALTERNATIVES:
            try:
                return AutoModelForCausalLM.from_config(build_config(model_type, changes))
            # Sizes that do not fit a foreign model: the next ones may.
            except Exception:  # noqa: BLE001
                continue
    return None


def adapted_layers(model):
    return {
        name.removeprefix("base_model.model.").split(".lora_")[0]
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def assert_rule(model):
    """Every linear layer of the text part is adapted, but for those that the rule names."""
    text = {id(module) for module in model.get_decoder().modules()}
    linear = {
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and id(module) in text and module is not model.get_output_embeddings()
    }
    names, skipped = find_default_targets(model)
    missing = linear - set(names)
    assert set(names) <= linear
    assert not [name for name in names if NEVER.search(name)]
    barred = {name for name in missing if not NEVER.search(name) and ".mamba." not in name and ".mixer." not in name}
    assert len(barred) == skipped.get("barred by PEFT", 0)
    assert not barred or {name.rpartition(".")[2] for name in barred} <= EXPERT_NAMES
    # Inkling 2 has its projections one level deeper: self_attn.o_proj.linear.
    ends = {part for name in names for part in name.split(".")[-2:]}
    assert ends & {"o_proj", "out_proj", "kv_proj", "in_proj"}
    return names, skipped


def test_default_lora_of_every_mixture_follows_the_rule(subtests):
    # Here and not as parameters: each process that collects the file would build 189 configurations.
    mixtures = sorted(filter(is_mixture, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
    assert len(mixtures) > 30
    for model_type in mixtures:
        with subtests.test(model_type=model_type):
            model = build(model_type)
            assert (model is None) == (model_type in NOT_BUILT)
            if model is not None:
                assert_rule(model)


@pytest.mark.parametrize("name", [*MOE, *MORE_MOE, *HYBRIDS])
def test_default_lora_trains_what_the_rule_names_and_nothing_else(name):
    model = build_tiny(name)
    names, _ = assert_rule(model)
    adapted = add_adapters(model, lora=LoraConfig(r=2, init_lora_weights=False), adapter_dtype=torch.float32)
    assert adapted_layers(adapted) == set(names)
    assert not adapted.peft_config["default"].target_parameters
    tensors = [key.replace(".default.", ".") for key, value in adapted.named_parameters() if value.requires_grad]
    assert not find_lost_names(adapted, tensors)
    batch = make_batch()
    adapted(input_ids=batch["input_ids"], labels=batch["labels"]).loss.backward()
    still = [key for key, value in adapted.named_parameters() if value.requires_grad and not value.grad.any()]
    assert not still


def test_a_mixture_with_all_linear_takes_experts_as_peft_does():
    adapted = add_adapters(
        build_tiny("qwen3_moe"), lora=LoraConfig(r=2, target_modules="all-linear"), adapter_dtype=torch.float32
    )
    assert any("experts" in name for name in adapted_layers(adapted))


def test_names_are_as_short_as_they_can_be():
    names = ["a.0.attn.q", "a.1.attn.q", "a.0.mlp.gate"]
    assert shorten(names, others=["a.0", "a.1.moe.gate"]) == ["mlp.gate", "q"]
    assert shorten(["q"], others=["a.q"]) == ["q"]


@pytest.mark.parametrize(
    ("lora", "nearest"),
    [
        ({"target_modules": ["q_proj", "v_porj"]}, "v_proj"),
        ({"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_porj"]}, "mlp.experts.gate_up_proj"),
        ({"target_modules": ["attn.q_proj"]}, "self_attn.q_proj"),
    ],
)
def test_a_wrong_target_is_refused_with_the_nearest_names(lora, nearest):
    with pytest.raises(OptionError, match=re.escape(nearest)):
        add_adapters(build_tiny("qwen3_moe"), lora=LoraConfig(r=2, **lora), adapter_dtype=torch.float32)


@pytest.mark.parametrize("others", [{}, {r"mlp\.no_such_\w+": 3}])
def test_ranks_and_alphas_of_expert_stacks_are_read(others, tmp_path, recwarn):
    stacks = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    patterns = {"rank_pattern": {"gate_up_proj": 2, "q_proj": 3}, "alpha_pattern": {stacks[1]: 3, **others}}
    lora = LoraConfig(r=4, lora_alpha=4, target_modules=["q_proj"], target_parameters=stacks, **patterns)
    adapted = add_adapters(build_tiny("qwen3_moe"), lora=lora, adapter_dtype=torch.float32)
    save_adapters(adapted, tmp_path / "saved")
    told = {str(warning.message) for warning in recwarn if "_pattern keys" in str(warning.message)}
    assert (told == set()) if not others else ["alpha_pattern" in words for words in told] == [True]
    layers = [layer for layer in adapted.modules() if hasattr(layer, "parameter_name")]
    assert {(layer.parameter_name, layer.r["default"], layer.scaling["default"]) for layer in layers} == {
        ("gate_up_proj", 2, 2.0),
        ("down_proj", 4, 0.75),
    }


@pytest.mark.parametrize("name", ["llama4_text", "phimoe"])
def test_a_router_that_returns_a_tuple_is_no_target(name):
    with pytest.raises(OptionError, match="Remove 'router'"):
        add_adapters(build_tiny(name), lora=LoraConfig(r=2, target_modules=["router"]), adapter_dtype=torch.float32)
    adapted = add_adapters(
        build_tiny(name), lora=LoraConfig(r=2, target_modules="all-linear"), adapter_dtype=torch.float32
    )
    assert not any("router" in layer for layer in adapted_layers(adapted))


def test_a_name_that_peft_maps_to_experts_is_no_wrong_target():
    lora = LoraConfig(r=2, target_modules=["q_proj", "gate_proj", "up_proj", "down_proj"])
    adapted = add_adapters(build_tiny("qwen3_moe"), lora=lora, adapter_dtype=torch.float32)
    assert any("experts" in name for name in adapted_layers(adapted))


def test_a_checkpoint_holds_the_targets_of_the_rule_and_the_table_shows_them():
    tuner = FineTuner(build_tiny("qwen3_next"), lora={"r": 2})
    tuner.configure_model()
    targets = tuner.hparams["lora"]["target_modules"]
    assert "q_proj" in targets
    again = FineTuner(build_tiny("qwen3_next"), lora=tuner.hparams["lora"])
    again.configure_model()
    assert set(again.state_dict()) == set(tuner.state_dict())
    (status,) = [status for status in tuner.statuses() if status.name == "LoRA"]
    trained = sum(value.numel() for value in tuner.state_dict().values())
    assert f"{trained:,} trained weights" in status.reason
    assert "routers" in status.reason


def test_adapters_of_the_earlier_default_are_refused_in_words_and_load_with_all_linear():
    earlier = FineTuner(build_tiny("mixtral"), lora={"r": 2, "target_modules": "all-linear"})
    earlier.configure_model()
    tuner = FineTuner(build_tiny("mixtral"), lora={"r": 2})
    tuner.configure_model()
    with pytest.raises(ResumeError, match="'target_modules': 'all-linear'"):
        tuner.load_state_dict(earlier.state_dict())


def test_targets_that_name_every_layer_are_described_by_their_kinds():
    ends = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    model = build_tiny("qwen3")
    targets = [name for name, _ in model.named_modules() if name.endswith(tuple(ends))]
    assert len(targets) == 2 * len(ends)
    adapted = add_adapters(model, lora=LoraConfig(r=2, target_modules=targets), adapter_dtype=torch.float32)
    shown = describe_adapters(adapted, adapted.peft_config["default"], skipped=None)
    assert shown.endswith(f"on {', '.join(sorted(ends))}")


def test_a_stack_of_experts_as_a_module_is_answered_with_target_parameters():
    lora = LoraConfig(r=2, target_modules=["q_proj", "gate_up_proj"])
    with pytest.raises(OptionError, match=r"in target_parameters: \[mlp\.experts\.gate_up_proj\]"):
        add_adapters(build_tiny("qwen3_moe"), lora=lora, adapter_dtype=torch.float32)
