"""``fastft doctor``: what would be active for a model on this machine, found by one step of a miniature of it; nothing of the user's is trained."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import Checkpoint, ProgressBar
from lightning.pytorch.cli import SaveConfigCallback

from lightning_fastft.cli import FastFTCLI
from lightning_fastft.datamodule import PackedDataModule
from lightning_fastft.errors import OptionError
from lightning_fastft.module import FineTuner
from lightning_fastft.status import render_status_table

# The miniature keeps what decides (family, heads, windows, quantisation, adapters) and drops what only costs.
MOST_INTERMEDIATE, MOST_VOCAB, MOST_EXPERTS = 256, 512, 8
DOCUMENT_LENGTHS = (192, 64, 256, 1, 127)
# Options of a run that the miniature must not follow; they come last, so they win.
OVERRIDES = (
    *("--trainer.max_steps", "1", "--trainer.max_epochs", "1", "--trainer.limit_train_batches", "1", "--trainer.limit_val_batches", "0"),
    *("--trainer.accumulate_grad_batches", "1", "--trainer.logger", "false", "--trainer.enable_model_summary", "false"),
)


class _DoctorCLI(FastFTCLI):
    """Replace the model by a miniature, once everything of the config has been parsed and judged."""

    def before_instantiate_classes(self) -> None:
        options = self.config.model.init_args
        if not self.config.model.class_path.rpartition(".")[2] == FineTuner.__name__ or not isinstance(options.get("model"), (str, dict)):
            raise OptionError("fastft doctor makes a miniature of a FineTuner's model; for a module of your own the table is logged at the start of fit.")
        options.model = shrink_config(_read_config(options.model, options.get("revision")))
        options.init, options.tokenizer, options.revision = "random", None, None


def run_doctor(words: Sequence[str]) -> int:
    """Print the machine and the table of what is active and why not for the model of a config; return 0.

    Args:
        words: Arguments of ``fastft fit``.
    """
    with tempfile.TemporaryDirectory() as folder:
        cli = _DoctorCLI([*words, *OVERRIDES, "--trainer.default_root_dir", folder], run=False)
        trainer = cli.trainer
        trainer.callbacks = [callback for callback in trainer.callbacks if not isinstance(callback, (Checkpoint, ProgressBar, SaveConfigCallback))]
        seed_everything(1, verbose=False)
        rows = [{"input_ids": torch.randint(3, cli.model.vocab_size, (length,)).tolist()} for length in DOCUMENT_LENGTHS]
        data = PackedDataModule(rows, max_tokens=sum(DOCUMENT_LENGTHS), num_workers=0, num_proc=1, cache_dir=None, max_reject_share=1.0, show_progress=False)
        trainer.fit(cli.model, datamodule=data)
        table = render_status_table(trainer.strategy.statuses()) if hasattr(trainer.strategy, "statuses") else "the strategy is not ours: nothing is active"
    sys.stdout.write(f"{describe_machine()}\nmodel: {cli.model.source.config.model_type}, checked by one step of a miniature\n\n{table}\n")
    return 0


def describe_machine() -> str:
    """Return the devices and the versions that decide what can be active, one per line."""
    from importlib.metadata import PackageNotFoundError, version

    lines = []
    for number in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(number)
        lines.append(f"device {number}: {device.name}, {device.total_memory / 2**30:.0f} GiB, compute capability {device.major}.{device.minor}")
    if not lines:
        lines.append(f"device: CPU, {torch.get_num_threads()} threads")
    versions = []
    for package in ("torch", "lightning", "transformers", "peft", "bitsandbytes", "triton", "nvidia-cudnn-frontend"):
        try:
            versions.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            versions.append(f"{package} not installed")
    return "\n".join([*lines, ", ".join(versions)])


def shrink_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration of the same family with few layers, experts and tokens; head shapes, windows and layer kinds stay.

    Args:
        config: A transformers configuration as a dictionary.

    Example:
        >>> small = shrink_config({"model_type": "qwen3", "num_hidden_layers": 36, "head_dim": 128, "vocab_size": 151936, "intermediate_size": 12288})
        >>> small["num_hidden_layers"], small["head_dim"], small["vocab_size"], small["intermediate_size"]
        (2, 128, 512, 256)
    """
    small = dict(config)
    if isinstance(small.get("text_config"), dict):
        return {**small, "text_config": shrink_config(small["text_config"])}
    kinds = list(small.get("layer_types") or [])
    num_layers = max(2, int(small.get("first_k_dense_replace") or 0) + 1)
    while kinds and num_layers < len(kinds) and set(kinds[:num_layers]) != set(kinds):
        num_layers += 1
    num_layers = min(num_layers, int(small.get("num_hidden_layers", num_layers)))
    small["num_hidden_layers"] = num_layers
    if kinds:
        small["layer_types"] = kinds[:num_layers]
    for names, most in (
        (("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"), MOST_INTERMEDIATE),
        (("num_experts", "num_local_experts", "n_routed_experts"), MOST_EXPERTS),
        (("vocab_size", "vocab_size_per_layer_input"), MOST_VOCAB),
    ):
        for name in names:
            if isinstance(small.get(name), int):
                small[name] = min(small[name], most)
    experts = next((small[name] for name in ("num_experts", "num_local_experts", "n_routed_experts") if isinstance(small.get(name), int)), None)
    if experts is not None:
        for name in ("num_experts_per_tok", "top_k"):
            if isinstance(small.get(name), int):
                small[name] = min(small[name], experts)
        small.update({name: 1 for name in ("n_group", "topk_group") if name in small})
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if name in small:
            small[name] = 0
    return small


def _read_config(model: str | dict[str, Any], revision: str | None) -> dict[str, Any]:
    """Return the configuration of the model; only this one file is fetched from the hub."""
    from lightning_fastft.models.loading import ModelSource

    config = ModelSource(model, init="random", revision=revision).config
    return {**config.to_dict(), "model_type": config.model_type}
