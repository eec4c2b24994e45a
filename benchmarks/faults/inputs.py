"""R18, R22: files from untrusted sources, and option values out of range."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import load_dataset
from lightning.pytorch import seed_everything
from lightning.pytorch.cli import LightningCLI
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    get_cosine_schedule_with_warmup,
)

from benchmarks.faults import child
from benchmarks.faults.table import GOOD
from lightning_fastft import FineTuner, PackedDataModule
from lightning_fastft.cli import main as fastft
from lightning_fastft.hf.loading.model import build_model
from lightning_fastft.hf.loading.source import ModelSource
from tests.cli.hostile_configs import HOSTILE as HOSTILE_YAML
from tests.cli.hostile_configs import hostile_text, write_traps
from tests.faults import test_option_ranges as ranges
from tests.faults.test_hostile_input import CONFIG, HOSTILE, MOST_BYTES, MOST_SECONDS, load
from tests.packing.conftest import UNMARKED, build_tokenizer

# A config that names a class of ours says nothing about a stack without it.
YAML_NAMES = [name for name in HOSTILE_YAML if "lightning_fastft" not in HOSTILE_YAML[name]]


def hostile(folder: Path, *, stack: str, num_trials: int) -> list[str]:
    """R18: each config through the command line of the stack, each model folder or file of rows through its loaders."""
    good = folder / "good"
    child.run(folder, lambda: _write_good(good))
    cases: list[tuple[Callable[..., None], str]] = [
        *((_read_config, name) for name in YAML_NAMES),
        *((_read_folder, name) for name in HOSTILE),
    ]
    cases = cases[:: max(1, len(cases) // num_trials)][:num_trials]
    verdicts = []
    for number, (read, name) in enumerate(cases):
        place = folder / f"case{number}"
        shutil.copytree(good, place / "model")
        end = child.run(
            folder, partial(_open_hostile, place, read, name, stack=stack), limit_s=MOST_SECONDS, limit_bytes=MOST_BYTES
        )
        what = name.partition(":")[0] if read is _read_folder else "config of the command line"
        if (place / "canary").exists():
            verdicts.append(f"ran code ({what})")
        elif end.code == 0:
            verdicts.append(GOOD)
        else:
            verdicts.append(
                f"hung for {MOST_SECONDS:.0f} s ({what})" if end.code is None else f"took the process down ({what})"
            )
        shutil.rmtree(place)
    return verdicts


def _write_good(folder: Path) -> None:
    build_model(ModelSource(CONFIG, init="random"), device=torch.device("cpu"), dtype=torch.float32).save_pretrained(
        folder
    )
    build_tokenizer(chat_template=UNMARKED).save_pretrained(folder)


def _open_hostile(place: Path, read: Callable[..., None], name: str, *, stack: str) -> None:
    os.chdir(place)
    sys.path.append(str(place))
    # How a library refuses is its own; what counts is that no code runs and that the process stands.
    try:
        read(place, name, stack=stack)
    except (Exception, SystemExit, KeyboardInterrupt) as error:  # noqa: BLE001
        print(f"{name}: {type(error).__name__}: {str(error)[:200]}", file=sys.stderr)


def _read_config(place: Path, name: str, *, stack: str) -> None:
    write_traps(place)
    (place / "config.yaml").write_text(hostile_text(name, folder=place, model=place / "model"))
    words = ["fit", "--config", "config.yaml"]
    if stack == "ours":
        fastft(words)
    else:
        LightningCLI(args=words, save_config_callback=None)


def _read_folder(place: Path, name: str, *, stack: str) -> None:
    kind, change, _ = HOSTILE[name]
    change(place / "model")
    if stack == "ours":
        load(kind, place / "model")
    elif kind == "model":
        AutoModelForCausalLM.from_pretrained(place / "model")
    elif kind == "tokenizer":
        AutoTokenizer.from_pretrained(place / "model")("two plus two")
    else:
        tokenizer = AutoTokenizer.from_pretrained(place / "model")
        data = load_dataset(
            "json", data_files=str(place / "model" / "rows.jsonl"), split="train", cache_dir=str(place / "cache")
        )
        for row in data:
            tokenizer.apply_chat_template(row["messages"])


def _weight() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.ones(2))


def _adapt(**options: Any) -> None:
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    )
    get_peft_model(model, LoraConfig(target_modules="all-linear", **options))


def _tune(**options: Any) -> None:
    FineTuner(ranges.CONFIG, init="random", **options)


def _warm_up(value: Any) -> None:
    optimizer = torch.optim.AdamW([_weight()])
    scheduler = get_cosine_schedule_with_warmup(optimizer, value, 100)
    optimizer.step()
    scheduler.step()


_EXAMPLES: Any = [1]
# By option: the range, who takes it in the default stack, and who in ours.
_TUNER, _DATA = ranges.OPTIONS["FineTuner"], ranges.OPTIONS["PackedDataModule"]
OPTIONS: dict[str, tuple[Callable[[Any], bool], Callable[[Any], object], Callable[[Any], object]]] = {
    "learning rate": (
        _TUNER["learning_rate"],
        lambda v: torch.optim.AdamW([_weight()], lr=v),
        lambda v: _tune(learning_rate=v),
    ),
    "weight decay": (
        _TUNER["weight_decay"],
        lambda v: torch.optim.AdamW([_weight()], weight_decay=v),
        lambda v: _tune(weight_decay=v),
    ),
    "warm-up steps": (_TUNER["warmup_steps"], _warm_up, lambda v: _tune(warmup_steps=v)),
    "rank of adapters": (ranges.LORA["r"], lambda v: _adapt(r=v), lambda v: _tune(lora={"r": v})),
    "alpha of adapters": (
        ranges.LORA["lora_alpha"],
        lambda v: _adapt(lora_alpha=v),
        lambda v: _tune(lora={"lora_alpha": v}),
    ),
    "dropout of adapters": (
        ranges.LORA["lora_dropout"],
        lambda v: _adapt(lora_dropout=v),
        lambda v: _tune(lora={"lora_dropout": v}),
    ),
    "longest example": (
        _DATA["max_tokens"],
        lambda v: build_tokenizer()("two plus two is four", truncation=True, max_length=v),
        lambda v: PackedDataModule("rows.jsonl", max_tokens=v),
    ),
    "workers": (
        _DATA["num_workers"],
        lambda v: DataLoader(_EXAMPLES, num_workers=v),
        lambda v: PackedDataModule("rows.jsonl", num_workers=v),
    ),
    "seed": (_DATA["seed"], lambda v: seed_everything(v), lambda v: PackedDataModule("rows.jsonl", seed=v)),
}


def fuzzed(folder: Path, *, stack: str, num_trials: int) -> list[str]:
    """R22: the values of the pool that lie outside of an option's range, for options that both stacks have.

    Left out is what might be meant well: None, and what Python takes for a whole number.
    """
    verdicts = []
    for name, (is_inside, *makers) in list(OPTIONS.items())[:num_trials]:
        make = makers[stack == "ours"]
        values = [value for value in ranges.POOL if not is_inside(value) and not _is_meant_well(value)]
        for value in values:
            end = child.run(folder, partial(_is_taken, make, value), limit_s=MOST_SECONDS, limit_bytes=MOST_BYTES)
            verdicts.append(
                f"taken ({name})" if end.answer else f"took the process down ({name})" if end.answer is None else GOOD
            )
    return verdicts


def _is_meant_well(value: Any) -> bool:
    return value is None or isinstance(value, bool) or value == 1 or (isinstance(value, str) and value in ("1", "true"))


def _is_taken(make: Callable[[Any], object], value: Any) -> bool:
    # Any refusal will do.
    try:
        make(value)
    except Exception:  # noqa: BLE001
        return False
    return True
