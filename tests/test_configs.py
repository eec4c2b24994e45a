import inspect
import json
from importlib import import_module

import pytest
import yaml

from lightning_fastft.cli.lightning_cli import CONFIG_FOLDER, FastFTCLI, config_names

# One tiny model per family that the configs name; the rest of each config is used as it stands.
SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
FAMILIES = {
    "moe_qwen3": {"model_type": "qwen3_moe", **EXPERTS},
    "moe_gpt_oss": {
        "model_type": "gpt_oss",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "long_context_llama": {"model_type": "llama"},
    "lora_qwen3_vl": {
        "model_type": "qwen3_vl",
        "text_config": SIZES,
        "vision_config": {
            "depth": 1,
            "hidden_size": 32,
            "num_heads": 2,
            "intermediate_size": 32,
            "out_hidden_size": 64,
        },
    },
}
HEAD = ("# Purpose: ", "# Command: fastft ", "# Hardware: ", "# Expected: ")


def read(name: str) -> dict:
    return yaml.safe_load((CONFIG_FOLDER / f"{name}.yaml").read_text())


def named_classes(value):
    """Yield every (class path, init_args) of a config."""
    if isinstance(value, dict):
        if "class_path" in value:
            yield value["class_path"], value.get("init_args", {})
        for item in value.values():
            yield from named_classes(item)
    elif isinstance(value, list):
        for item in value:
            yield from named_classes(item)


def test_the_main_jobs_have_a_config():
    for job in ("demo", "lora_", "qlora_", "full_", "long_context_", "moe_"):
        assert any(name.startswith(job) for name in config_names())


@pytest.mark.parametrize("name", config_names())
def test_config_reads_as_a_recipe(name):
    lines = (CONFIG_FOLDER / f"{name}.yaml").read_text().splitlines()
    for line, start in zip(lines, HEAD):
        assert line.startswith(start)
    content = read(name)
    assert list(content) == ["data", "model", "trainer"]
    assert list(content["trainer"])[:2] == ["strategy", "callbacks"]
    assert content["trainer"]["precision"] == "32-true"
    assert name == "demo" or name in lines[1]


@pytest.mark.parametrize("name", config_names())
def test_config_holds_only_values_that_differ_from_the_default(name):
    for path, options in named_classes(read(name)):
        module, _, class_name = path.rpartition(".")
        parameters = inspect.signature(getattr(import_module(module), class_name)).parameters
        for option, value in options.items():
            assert parameters[option].default != value, f"{name}: {option} of {path}"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:GradientHealth judged nothing")
@pytest.mark.parametrize("name", config_names())
def test_config_runs_one_step_of_a_tiny_model(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    family = next((family for start, family in FAMILIES.items() if name.startswith(start)), {"model_type": "qwen3"})
    (tmp_path / "config.json").write_text(json.dumps({**SIZES, **family}))
    rows = [{"input_ids": [1 + (row + position) % 60 for position in range(3 + row % 7)]} for row in range(200)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [
        "--data.paths",
        "train.jsonl",
        "--data.cache_dir",
        "null",
        "--data.num_workers",
        "0",
        "--data.num_proc",
        "1",
        "--data.max_tokens",
        "64",
    ]
    words += [
        "--model.model",
        "config.json",
        "--model.init",
        "random",
        "--trainer.accelerator",
        "cpu",
        "--trainer.max_steps",
        "1",
    ]
    words += ["--trainer.limit_val_batches", "1", "--trainer.logger", "false", "--trainer.default_root_dir", "out"]
    if name == "demo":
        words += ["--data.val_paths", "train.jsonl"]
    run = FastFTCLI(["fit", "--config", name, *words])
    assert run.trainer.global_step == 1
    states = {status.name: status.state for status in run.trainer.strategy.statuses()}
    assert states["packed attention"] == states["loss head"] == "active"
    assert run.model.quantization == ("nf4" if name.startswith(("qlora", "long_context")) else None)
