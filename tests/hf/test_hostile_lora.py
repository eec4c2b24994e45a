"""LoRA configurations of strangers: they import nothing, read no file, and ask for work that ends."""

import pytest
from peft import LoraConfig
from torch import nn

from lightning_fastft.core.errors import OptionError
from lightning_fastft.hf import lora as lora_module
from lightning_fastft.hf.lora import check_patterns, parse_lora

NAMES = [name for name, _ in nn.Sequential(*(nn.Sequential(nn.Linear(1, 1)) for _ in range(4))).named_modules()] + [
    "model.layers.0.self_attn.q_proj"
]


@pytest.mark.parametrize(
    "fields",
    [
        {"megatron_config": {"a": 1}, "megatron_core": "hostile"},
        {"megatron_core": "hostile"},
        {"auto_mapping": {"parent_library": "hostile"}},
        {"init_lora_weights": "pissa_niter_1000000000"},
        {"layer_replication": [[0, 10**9]]},
        {"layer_replication": [1]},
        {"layer_replication": [[0, 2], [1, 2]]},
        {"rank_pattern": {"q_proj": 2**40}},
        {"target_modules": "q*" * 10_000},
    ],
)
def test_a_configuration_that_imports_or_never_ends_is_refused_as_a_mapping_and_as_an_object(fields):
    with pytest.raises(OptionError, match="lora"):
        parse_lora(fields)
    with pytest.raises(OptionError, match="lora"):
        parse_lora(LoraConfig(**fields))


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        # PEFT would take these words as true; a null on the command line is the text "None".
        ({"use_dora": "None"}, "lora.use_dora must be True or False, got 'None'"),
        ({"use_rslora": "maybe"}, "lora.use_rslora must be"),
        ({"lora_bias": 1}, "lora.lora_bias must be"),
        ({"inference_mode": "no"}, "lora.inference_mode must be"),
        # Files of saved adapters have it.
        ({"inference_mode": True}, "give their folder as adapter"),
        ({"modules_to_save": "embed_tokens,lm_head"}, r"Write \[embed_tokens, lm_head\]"),
        ({"trainable_token_indices": 5}, r"a list of token ids, got 5. Write \[5\]"),
        ({"trainable_token_indices": [3, -1]}, "trainable_token_indices must be at least 0, got -1"),
        ({"trainable_token_indices": {"embed_tokens": [1.5]}}, "trainable_token_indices must be a whole number"),
    ],
)
def test_values_of_another_type_are_refused(fields, told):
    with pytest.raises(OptionError, match=told):
        parse_lora(fields)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"alora_invocation_tokens": [5]}, "once in each row"),
        ({"arrow_config": {}}, "already trained"),
        ({"kasa_config": {}}, "added to the loss"),
        ({"monteclora_config": {}}, "added to the loss"),
        ({"velora_config": {}}, "padding included"),
        # PEFT ignores unknown fields inside these.
        ({"init_lora_weights": "eva", "eva_config": {"rhoo": 2.0}}, r"eva_config .*'rhoo'. Did you mean rho\?"),
        ({"init_lora_weights": "loftq", "loftq_config": {"loftq_iters": 4}}, r"Did you mean loftq_iter\?"),
    ],
)
def test_variants_that_would_train_something_else_are_refused(fields, told):
    with pytest.raises(OptionError, match=told):
        parse_lora(fields)


def test_flags_may_be_null_and_ids_a_list():
    lora = {"use_dora": None, "fan_in_fan_out": None, "trainable_token_indices": {"embed_tokens": [3, 5]}}
    assert not parse_lora(lora).use_dora


@pytest.mark.parametrize("field", ["cache_file", "covariance_file"])
def test_a_configuration_that_names_a_file_is_refused(field):
    with pytest.raises(OptionError, match="names a file"):
        parse_lora({"init_lora_weights": "corda", "corda_config": {field: "poison.pt"}})


def test_patterns_that_end_are_taken():
    for pattern in (
        r".*\.(q|k|v|o)_proj",
        r"model\.layers\.(0|[1-9][0-9]*)\..*_proj",
        "all-linear",
        "q_proj",
        r"^(?!.*vision).*proj$",
    ):
        check_patterns(parse_lora({"target_modules": pattern, "rank_pattern": {r".*\.q_proj": 4}}), NAMES)
    assert parse_lora({"init_lora_weights": "pissa_niter_16"}).init_lora_weights == "pissa_niter_16"


@pytest.mark.parametrize("field", ["target_modules", "exclude_modules", "rank_pattern"])
def test_patterns_that_never_end_are_refused(field, monkeypatch):
    monkeypatch.setattr(lora_module, "PATTERN_SECONDS", 0.5)
    pattern = "(([a-z_0-9.])+)+!"
    with pytest.raises(OptionError, match="pattern"):
        check_patterns(parse_lora({field: {pattern: 4} if field == "rank_pattern" else pattern}), NAMES)


def test_a_pattern_that_is_none_is_refused():
    with pytest.raises(OptionError, match="not a regular expression"):
        check_patterns(parse_lora({"target_modules": "(q.*"}), NAMES)
