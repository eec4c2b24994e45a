"""``fastft doctor``: show which features are active for a model on this machine, by one step of a miniature model."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, DeviceStatsMonitor, LearningRateMonitor, ProgressBar
from lightning.pytorch.cli import SaveConfigCallback
from torch.utils.data import DataLoader

from lightning_fastft.cli.imports import find_loaded
from lightning_fastft.cli.lightning_cli import FastFTCLI
from lightning_fastft.cli.words import CONFIG_FOLDER, find_configs
from lightning_fastft.core.errors import OptionError, count
from lightning_fastft.core.extras import version_of
from lightning_fastft.core.status import render_status_table
from lightning_fastft.packing.collate import Document, PackedBatch, collate
from lightning_fastft.packing.reading.folders import is_local
from lightning_fastft.packing.reading.sources import list_sources, open_sources
from lightning_fastft.training.datamodule import PackedDataModule
from lightning_fastft.training.distillation import DistillationTuner
from lightning_fastft.training.reference import ADAPTERS_OFF, ReferenceTuner
from lightning_fastft.training.rollouts import RolloutDataModule
from lightning_fastft.training.tuner import Tuner

# Upper bounds for sizes of the miniature. It keeps family, heads, windows, quantisation and adapters.
MOST = {
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"), 256),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 8),
    **dict.fromkeys(("num_experts_per_tok", "top_k"), 2),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 512),
}
SOURCES = ("paths", "val_paths", "test_paths", "predict_paths", "prompts")
DOCUMENT_LENGTHS = (192, 64, 256, 2, 126)
# Options that override those of the run; they come last, so they take effect.
OVERRIDES = (
    "--trainer.max_steps=1",
    "--trainer.max_epochs=1",
    "--trainer.limit_train_batches=1",
    "--trainer.limit_val_batches=0",
    "--trainer.accumulate_grad_batches=1",
    "--trainer.logger=false",
    "--trainer.enable_model_summary=false",
)


# Callbacks of which the one step has no use; some need a logger.
_LEFT_OUT = (Checkpoint, DeviceStatsMonitor, LearningRateMonitor, ProgressBar, SaveConfigCallback)


class LastTable(Callback):
    """Record the status table at the end of training, before teardown."""

    text = "the strategy is not of lightning_fastft: nothing is active"

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Render the status table."""
        if hasattr(trainer.strategy, "statuses"):
            self.text = render_status_table(trainer.strategy.statuses())


class _DoctorCLI(FastFTCLI):
    """Replace the model by a miniature after the config has been parsed and validated."""

    def __init__(self, args: Sequence[str], **options: Any) -> None:
        self.examples = _find_examples(args)
        super().__init__(args, **options)

    def before_instantiate_classes(self) -> None:
        if find_loaded(self.config.data.class_path) in (PackedDataModule, RolloutDataModule):
            _check_sources(self.config.data.init_args, examples=self.examples)
        options, owner = self.config.model.init_args, find_loaded(self.config.model.class_path)
        if not (isinstance(owner, type) and issubclass(owner, Tuner)) or not isinstance(
            options.get("model"), (str, dict)
        ):
            raise OptionError(
                "fastft doctor needs a FineTuner or another tuner of lightning_fastft. For other modules the status "
                "table is logged at the start of fit."
            )
        options.model = shrink_config(_read_config(options.model, options.get("revision")))
        options.init, options.tokenizer, options.revision = "random", None, None


def run_doctor(words: Sequence[str]) -> int:
    """Print the machine and the status table for the model of a config; return 0.

    Args:
        words: Arguments of ``fastft fit``.

    Raises:
        DataError: A data file or folder is missing or cannot be read. Data is not tokenised, and example paths of
            shipped configs need not exist.
    """
    table = LastTable()
    with tempfile.TemporaryDirectory() as folder, _quiet():
        cli = _DoctorCLI([*words, *OVERRIDES, "--trainer.default_root_dir", folder], run=False, callbacks=[table])
        trainer = cli.trainer
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        callbacks[:] = [callback for callback in callbacks if not isinstance(callback, _LEFT_OUT)]
        _replace_second_model(cli.model, device=trainer.strategy.root_device)
        batch = _make_batch(cli.model, num_parts=getattr(trainer.strategy, "context_parallel", 1))
        trainer.fit(cli.model, DataLoader([batch], batch_size=None))  # type: ignore[arg-type, list-item]
    model = (
        f"model: {cli.model.source.config.model_type}, checked by one step of a miniature, whose layers and tensors "
        "are counted below"
    )
    if trainer.is_global_zero:
        sys.stdout.write(f"{_describe_devices()}\n{model}\n\n{table.text}\n")
    return 0


def _make_batch(tuner: Tuner, *, num_parts: int) -> PackedBatch:
    """Return one pack of random tokens: documents, or prompts with two completions each if the loss needs them.

    It can be cut into num_parts parts.
    """
    documents = []
    for length in DOCUMENT_LENGTHS:
        id_T = np.random.default_rng(length).integers(tuner.vocab_size, size=length)
        documents.append(Document(id_T, id_T))
        if tuner.data_needs.formats:
            # At least a token for the prompt and each completion.
            lengths = (length, 2, 1)
            id_T = np.concatenate([id_T, id_T[:2], id_T[-1:]])
            documents[-1] = Document(id_T, id_T, segment_lengths=lengths, scores=(1.0, 0.0))
    return collate(documents, pad_to_multiple_of=num_parts)


def _replace_second_model(tuner: Tuner, *, device: torch.device) -> None:
    """Replace a reference or a teacher by a second miniature, also where its values would be stored before the run."""
    from lightning_fastft.hf.dtypes import resolve_dtype
    from lightning_fastft.hf.loading.model import build_model

    if isinstance(tuner, DistillationTuner):
        tuner.store = None
    elif isinstance(tuner, ReferenceTuner) and tuner.needs_reference and tuner.reference != ADAPTERS_OFF:
        tuner.reference = "a miniature"
    else:
        return
    assert tuner.source is not None
    model = build_model(tuner.source, device=device, dtype=resolve_dtype(tuner.dtype_name, device=device))
    tuner.frozen_model = model.requires_grad_(False).eval()


def _find_examples(words: Sequence[str]) -> set[str]:
    """Return the data paths of the given shipped configs that are not on the command line: example files."""
    import yaml

    given = [value for word in words for value in (word, word.partition("=")[2])]
    shipped = [Path(word) for word in find_configs(words) if word.startswith(str(CONFIG_FOLDER))]
    options = [yaml.safe_load(path.read_text())["data"]["init_args"] for path in shipped]
    return {values[name] for values in options for name in SOURCES if name in values} - set(given)


def _check_sources(options: Mapping[str, Any], *, examples: set[str]) -> None:
    """Check that data files and folders exist and can be read; hub ids are not checked."""
    for name in SOURCES:
        given = options.get(name)
        for source in list_sources(given):
            if (
                isinstance(source, (str, os.PathLike))
                and os.fspath(source) not in examples
                and is_local(os.fspath(source))
            ):
                open_sources(source)


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress logs and warnings of Lightning about the one step."""
    log = logging.getLogger("lightning.pytorch")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)


def _describe_devices() -> str:
    """Return the devices and the relevant package versions, one per line."""
    lines = []
    for number in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(number)
        lines.append(
            f"device {number}: {device.name}, {device.total_memory / 2**30:.0f} GiB, compute capability "
            f"{device.major}.{device.minor}"
        )
    if not lines:
        lines.append(f"device: CPU, {count(torch.get_num_threads(), 'thread')}")
    packages = ("torch", "lightning", "transformers", "peft", "bitsandbytes", "triton", "nvidia-cudnn-frontend")
    versions = [f"{package} {version_of(package) or 'not installed'}" for package in packages]
    return "\n".join([*lines, ", ".join(versions)])


def shrink_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return a small configuration of the same family; head shapes, windows and layer types are unchanged.

    Example:
        >>> small = shrink_config({"num_hidden_layers": 36, "head_dim": 128, "vocab_size": 151936})
        >>> small["num_hidden_layers"], small["head_dim"], small["vocab_size"]
        (2, 128, 512)
    """
    if isinstance(config.get("text_config"), dict):
        return {**config, "text_config": shrink_config(config["text_config"])}
    small = {**config, **_fewer_layers(config)}
    for name, most in MOST.items():
        if isinstance(small.get(name), int):
            small[name] = min(small[name], most)
    for name in ("n_group", "topk_group"):
        if name in small:
            small[name] = 1
    # Ids of the full vocabulary may be outside of the small one.
    small.update({name: 0 for name in ("pad_token_id", "bos_token_id", "eos_token_id") if name in small})
    return small


def _fewer_layers(config: dict[str, Any]) -> dict[str, Any]:
    """Return the layer fields for the smallest number of layers, at least two, that has every layer type."""
    kinds = list(config.get("layer_types") or [])
    num_layers = max(2, int(config.get("first_k_dense_replace") or 0) + 1)
    while num_layers < len(kinds) and set(kinds[:num_layers]) != set(kinds):
        num_layers += 1
    num_layers = min(num_layers, int(config.get("num_hidden_layers", num_layers)))
    return {"num_hidden_layers": num_layers, **({"layer_types": kinds[:num_layers]} if kinds else {})}


def _read_config(model: str | dict[str, Any], revision: str | None) -> dict[str, Any]:
    """Return the configuration of the model; only its file is downloaded from the hub."""
    from lightning_fastft.hf.loading.source import ModelSource

    config = ModelSource(model, init="random", revision=revision).config
    return {**config.to_dict(), "model_type": config.model_type}
