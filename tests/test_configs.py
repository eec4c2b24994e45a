import inspect
import json
import sys
from importlib import import_module

import pytest
import torch
import yaml
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from lightning_fastft.cli.lightning_cli import FastFTCLI
from lightning_fastft.cli.words import CONFIG_FOLDER, config_names
from lightning_fastft.kernels.attention.op import HOPPER, choose_backend, describe_need
from tests.support.sizes import sizes
from tests.support.training_parts import quiet_data

# A tiny model of each family, by a part of the names of its configs, the longest part first; the rest of a config is
# used as it stands.
SIZES = sizes(vocab=64, width=64, inner=64, layers=2, heads=2, key_heads=1, head_width=32)
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
    "qwen3": {"model_type": "qwen3"},
    "demo": {"model_type": "qwen3"},
}
# Rows that a config trains on, by the first word of its name; token ids elsewhere.
PAIRS = [{"prompt": f"w{row % 60}", "chosen": f" w{1 + row % 7} w3", "rejected": " w2"} for row in range(200)]
STEPS = [{"prompt": f"w{row % 60}", "completions": ["w1 w2", "w3"], "labels": [True, row % 2]} for row in range(200)]
PROMPTS = [{"prompt": f"w{row} w5", "completion": " w7 w8"} for row in range(40)]
ROWS = {
    "dpo": PAIRS, "orpo": PAIRS, "reward": PAIRS, "reward_process": STEPS, "gkd": PROMPTS,
    "grpo": [{"prompt": f"w{row} w5"} for row in range(20)],
}  # fmt: skip
HEAD = ("# Purpose: ", "# Command: fastft ", "# Hardware: ", "# Expected: ")


def read(name: str) -> dict:
    return yaml.safe_load((CONFIG_FOLDER / f"{name}.yaml").read_text())


REWARD = "def score(prompts, completions, **columns):\n    return [float(len(text)) for text in completions]\n"


def write_tokenizer(folder):
    core = Tokenizer(models.WordLevel({f"w{index}": index for index in range(64)}, unk_token="w0"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=core, eos_token="w0", pad_token="w0").save_pretrained(folder)


def write_teacher(folder):
    AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **SIZES)).save_pretrained(folder)


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
    jobs = (
        "demo",
        "lora_",
        "qlora_",
        "full_",
        "long_context_",
        "moe_",
        "dpo_",
        "orpo_",
        "reward_qwen",
        "reward_process_",
        "distill_",
        "grpo_",
        "gkd_",
    )
    for job in jobs:
        assert any(name.startswith(job) for name in config_names())


@pytest.mark.parametrize("name", config_names())
def test_config_reads_as_a_recipe(name):
    lines = (CONFIG_FOLDER / f"{name}.yaml").read_text().splitlines()
    for line, start in zip(lines, HEAD):
        assert line.startswith(start), f"line {HEAD.index(start) + 1} of a config begins with {start!r}"
    content = read(name)
    assert list(content) == ["data", "model", "trainer"]
    assert list(content["trainer"])[:2] == ["strategy", "callbacks"]
    assert content["trainer"]["precision"] == "32-true"
    assert name == "demo" or f"--config {name} " in f"{lines[1]} ", "the command runs the config itself"


@pytest.mark.parametrize("name", config_names())
def test_config_holds_only_values_that_differ_from_the_default(name):
    for path, options in named_classes(read(name)):
        module, _, class_name = path.rpartition(".")
        parameters = {}
        # Tuners take the options of their base by **options.
        for owner in reversed(getattr(import_module(module), class_name).__mro__):
            parameters.update(inspect.signature(owner.__init__).parameters)
        for option, value in options.items():
            assert parameters[option].default != value, f"{name}: {option} of {path}"


def test_packs_of_the_long_context_config_run_on_cudnn():
    options = {**read("long_context_llama_3.1_8b")["data"]["init_args"], "val_share": 0.2}
    del options["paths"]
    rows = [{"input_ids": [1] * length} for length in (9_001, 33_333, 20_002, 150_001, 5_003)]
    data = quiet_data(rows, **options)
    data.prepare_data()
    data.setup("fit")
    batches = [*data.train_dataloader(), *data.val_dataloader()]
    assert any(batch["context"].num_real_tokens % 512 for batch in batches)
    for batch in batches:
        # Llama-3.1 has heads of width 128; their count decides nothing.
        qkv = [torch.empty(batch["context"].num_tokens, 1, 128, dtype=torch.bfloat16, device="meta")] * 3
        need = describe_need(*qkv, context=batch["context"], window=None, softcap=None, sink_H=None)
        need = need._replace(device_type="cuda", capability=HOPPER, has_cudnn=True)
        assert choose_backend(need) == "cudnn"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:GradientHealth checked nothing")
@pytest.mark.parametrize("name", config_names())
def test_config_runs_one_step_of_a_tiny_model(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    families = [family for part, family in FAMILIES.items() if part in name]
    assert families, "add a tiny model of its family to FAMILIES of this file"
    (tmp_path / "config.json").write_text(json.dumps({**SIZES, **families[0]}))
    job = "reward_process" if name.startswith("reward_process") else name.partition("_")[0]
    rows = [{"input_ids": [1 + (row + position) % 60 for position in range(3 + row % 7)]} for row in range(200)]
    rows = ROWS.get(job, rows)
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if job == "grpo":
        monkeypatch.setattr(sys, "path", [*sys.path])
        (tmp_path / "config_rewards.py").write_text(REWARD)
        words = [
            "--allow-import",
            "config_rewards",
            "--data.rewards",
            "config_rewards.score",
            "--data.prompts",
            "train.jsonl",
        ]
        words += ["--data.max_new_tokens", "4", "--data.max_tokens", "128"]
    elif job == "gkd":
        words = ["--data.prompts", "train.jsonl", "--data.max_new_tokens", "4", "--data.max_tokens", "128"]
    else:
        words = ["--data.paths", "train.jsonl", "--data.cache_dir", "null", "--data.num_workers", "0"]
        words += ["--data.num_proc", "1", "--data.max_tokens", "64"]
    if job in ROWS:
        write_tokenizer(tmp_path / "words")
        words += ["--model.tokenizer", "words"]
    if job in ("distill", "gkd"):
        write_teacher(tmp_path / "teacher")
        words += ["--model.teacher", "teacher"]
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
    # A teacher has rows of its own, named after its place.
    place = " (model)" if job in ("distill", "gkd") else ""
    assert states[f"packed attention{place}"] == states[f"loss head{place}"] == "active"
    assert run.model.quantization == ("nf4" if name.startswith(("qlora", "long_context", "orpo")) else None)
