"""Every Python block of README and docs runs as printed, on tiny models under the names of the page."""

import json
import re
from itertools import chain
from pathlib import Path

import lightning.pytorch
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from lightning_fastft.demo.files import write_demo_files
from lightning_fastft.demo.generator import generate_rows

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")))
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16, "num_attention_heads": 4}
EXPERTS = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
NUM_ROWS = 40
# By the file that a block reads.
ROWS = {
    **dict.fromkeys(
        ("train.jsonl", "math.jsonl", "chat.jsonl"),
        lambda n: {"prompt": f"How many are {n} and {n}?", "completion": f"{2 * n}"},
    ),
    "pairs.jsonl": lambda n: {"prompt": f"How many are {n} and {n}?", "chosen": f"{2 * n}", "rejected": f"{2 * n + 1}"},
    "steps.jsonl": lambda n: {
        "prompt": f"What is {n} + 2 + 2?",
        "completions": [f"{n} + 2 = {n + 2}.", f"{n + 2} + 2 = {n + 4}."],
        "labels": [True, bool(n % 2)],
    },
    "prompts.jsonl": lambda n: {"prompt": f"How many are {n} and {n}?", "completion": f"{2 * n}", "answer": f"{2 * n}"},
}


def blocks(page):
    return re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)


class ShortTrainer(lightning.pytorch.Trainer):
    """The Trainer of a block, for three steps."""

    def __init__(self, **options):
        options.pop("max_epochs", None)
        super().__init__(**{**options, "max_steps": 3, "accelerator": "cpu", "logger": False})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a tiny model at each name of the pages, and rows in each file."""
    folder = tmp_path_factory.mktemp("blocks")
    files = write_demo_files(generate_rows(num_train=40, num_validation=4), folder / "demo", vocab_size=320)
    tokenizer = AutoTokenizer.from_pretrained(str(files.model))
    names = {name for page in PAGES for block in blocks(page) for name in re.findall(r'"(Qwen/[^"]+)"', block)}
    assert names
    for name in names:
        kind, more = ("qwen3_moe", EXPERTS) if "A3B" in name else ("qwen3", {})
        ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
        config = AutoConfig.for_model(
            kind, vocab_size=len(tokenizer), num_key_value_heads=2, max_position_embeddings=8192, **SIZES, **more, **ids
        )
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    for name, make_row in ROWS.items():
        text = "".join(json.dumps(make_row(number)) + "\n" for number in range(NUM_ROWS))
        (folder / name).write_text(text)
        (folder / f"new_{name}").write_text(text)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "number"),
    list(chain.from_iterable([(page, number) for number in range(len(blocks(page)))] for page in PAGES)),
)
def test_block_runs_as_printed(page, number, folder, tmp_path, monkeypatch):
    for source in folder.iterdir():
        (tmp_path / source.name).symlink_to(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(lightning.pytorch, "Trainer", ShortTrainer)
    block = blocks(page)[number]
    exec(compile(block, f"{page}, Python block {number}", "exec"), {"__name__": "block"})
