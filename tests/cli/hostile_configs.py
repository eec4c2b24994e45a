"""Configs that try to run code: each is text for a YAML file; whoever succeeds makes the file ``canary`` in the
current folder.
"""

import json
import os
import sys
from pathlib import Path

import torch

PLAIN = """
data: {class_path: lightning.pytorch.demos.boring_classes.BoringDataModule}
trainer: {accelerator: cpu, strategy: auto, max_steps: 1, logger: false, enable_checkpointing: false, enable_progress_bar: false}
"""
BORING = PLAIN + "model: {class_path: lightning.pytorch.demos.boring_classes.BoringModel}\n"
TINY = (
    "{model_type: qwen3, vocab_size: 64, hidden_size: 32, intermediate_size: 32, num_hidden_layers: 1, "
    "num_attention_heads: 2}"
)
TUNER = PLAIN + "model: {class_path: lightning_fastft.FineTuner, init_args: {model: " + TINY + ", init: random, %s}}\n"
ROWS = "[{messages: [{role: user, content: a}, {role: assistant, content: b}]}]"
PACKED = """
model: {class_path: lightning_fastft.FineTuner, init_args: {model: MODEL, init: random}}
data: {class_path: lightning_fastft.PackedDataModule, init_args: {%s, max_tokens: 64, num_workers: 0, num_proc: 1, cache_dir: null}}
trainer: {accelerator: cpu, strategy: fastft, max_steps: 1, logger: false, enable_checkpointing: false, enable_progress_bar: false}
"""
TRAINER = (
    "trainer: {accelerator: cpu, max_steps: 1, %s}\nmodel: {class_path: "
    "lightning.pytorch.demos.boring_classes.BoringModel}\n"
)
TRAINER += "data: {class_path: lightning.pytorch.demos.boring_classes.BoringDataModule}\n"
BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join(['*' + old] * 10)}]\n" for old, new in zip("abcdefghijk", "bcdefghijkl")
)
TEMPLATE = "{{ ''.__class__.__mro__[1].__subclasses__() }}{{ cycler.__init__.__globals__.os.system('touch canary') }}"

HOSTILE = {
    # Classes and functions of a module that lies on the path: its import alone would do.
    "foreign model": PLAIN + "model: {class_path: hostile.Model}\n",
    "foreign data": BORING.replace("lightning.pytorch.demos.boring_classes.BoringDataModule", "hostile.Data"),
    "foreign callback": TRAINER % "callbacks: [{class_path: hostile.Callback}]",
    "foreign logger": TRAINER % "logger: {class_path: hostile.Logger}",
    "foreign strategy": TRAINER % "strategy: {class_path: hostile.Strategy}",
    "foreign plugin": TRAINER % "plugins: [{class_path: hostile.Plugin}]",
    "foreign profiler": TRAINER % "profiler: {class_path: hostile.Profiler}",
    "foreign optimizer": TUNER % "optimizer: hostile.make_optimizer",
    "foreign adapters": TUNER % "lora: {class_path: hostile.LoraConfig}",
    "foreign hook": TRAINER
    % "callbacks: [{class_path: lightning.pytorch.callbacks.LambdaCallback, init_args: {on_train_start: "
    "hostile.hook}}]",
    "foreign tokenizer": PACKED % ("paths: " + ROWS + ", tokenizer: {class_path: hostile.Tokenizer}"),
    "foreign permission": "allow_import: hostile\n" + PLAIN + "model: {class_path: hostile.Model}\n",
    "foreign config file": PLAIN + "model: nested.yaml\n",
    # Commands of the standard library, by their own names and by names inside allowed packages.
    "command as optimizer": TUNER % "optimizer: {class_path: subprocess.Popen, init_args: {args: [touch, canary]}}",
    "command as scheduler": TUNER % "scheduler: {class_path: os.system, init_args: {command: touch canary}}",
    "command as data": PACKED % "paths: {class_path: subprocess.Popen, init_args: {args: [touch, canary]}}",
    "command by another name": TUNER
    % "optimizer: {class_path: lightning_fastft.cli.demo.subprocess.Popen, init_args: {args: [touch, canary]}}",
    # Functions of allowed packages that load pickles.
    "pickle as optimizer": TUNER
    % "optimizer: {class_path: torch.load, init_args: {f: poison.ckpt, weights_only: false}}",
    "pickle by a helper of lightning": TUNER
    % "optimizer: {class_path: lightning.fabric.utilities.cloud_io._load, init_args: {path_or_url: poison.ckpt, "
    "weights_only: false}}",
    "pickle as model": PLAIN
    + "model: {class_path: lightning_fastft.FineTuner.load_from_checkpoint, init_args: {checkpoint_path: poison.ckpt, "
    "weights_only: false}}\n",
    "pickle as checkpoint": BORING + "ckpt_path: poison.ckpt\n",
    "pickle as checkpoint, unlocked": BORING + "ckpt_path: poison.ckpt\nweights_only: false\n",
    "pickle as checkpoint by URL": BORING + "ckpt_path: URL\n",
    # The file format itself.
    "tag that calls": BORING + "ckpt_path: !!python/object/apply:os.system ['touch canary']\n",
    "tag that imports": BORING + "ckpt_path: !!python/name:hostile.Model\n",
    "shell and environment": TRAINER % "default_root_dir: '$(touch canary)`touch canary`${oc.env:HOME}'",
    "aliases of aliases": BOMB + BORING,
    "endless nesting": BORING + "ckpt_path: " + "[" * 300_000 + "]" * 300_000 + "\n",
    "template": PACKED % ("paths: " + ROWS + ', chat_template: "' + TEMPLATE + '"'),
    "code beside a model": PACKED.replace("MODEL", "remote") % "paths: [{input_ids: [1, 2, 3]}]",
}


class _Poison:
    def __reduce__(self):
        return os.system, ("touch canary",)


def write_traps(folder: Path) -> None:
    """Lay out what the configs refer to: a hostile module, a poisoned checkpoint, a config file, and a model
    folder with code beside it.
    """
    module = [
        "open('canary', 'w').close()",
        "from lightning.pytorch.demos.boring_classes import BoringModel as Model",
        "def hook(*args): pass",
    ]
    (folder / "hostile.py").write_text("\n".join(module) + "\n")
    (folder / "nested.yaml").write_text("class_path: hostile.Model\n")
    torch.save(
        {"state_dict": {}, "loops": _Poison(), "hyper_parameters": _Poison(), "pytorch-lightning_version": "2.6.6"},
        folder / "poison.ckpt",
    )
    remote = folder / "remote"
    remote.mkdir()
    auto_map = {
        "AutoConfig": "configuration_remote.RemoteConfig",
        "AutoModelForCausalLM": "configuration_remote.RemoteConfig",
    }
    (remote / "config.json").write_text(json.dumps({"model_type": "remote", "auto_map": auto_map}))
    (remote / "configuration_remote.py").write_text("open('canary', 'w').close()\n")
    sys.modules.pop("hostile", None)


def hostile_text(name: str, *, folder: Path, model: Path) -> str:
    """Return the text of one config, with the places of this test filled in."""
    return HOSTILE[name].replace("MODEL", str(model)).replace("URL", (folder / "poison.ckpt").as_uri())
