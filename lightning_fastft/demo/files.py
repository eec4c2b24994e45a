"""Write all that the demo trains from: rows as JSONL, and a model folder with a configuration, a tokenizer and a
chat template, but no weights.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from lightning_fastft.core.checks import check_int
from lightning_fastft.demo.generator import Row

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
# The trainer gives them the first ids, in this order.
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)
# The generation marks tell which tokens the assistant speaks: those are trained.
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if message['role'] == 'assistant' -%}
{{- '<|im_start|>assistant\\n' -}}{%- generation -%}
{{- message['content'] + '<|im_end|>' -}}{%- endgeneration -%}{{- '\\n' -}}
{%- else -%}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


class DemoFiles(NamedTuple):
    """Paths of the demo's files."""

    train: Path
    validation: Path
    model: Path


def write_demo_files(rows: tuple[list[Row], list[Row]], folder: str | Path, *, vocab_size: int = 512) -> DemoFiles:
    """Write rows of training and validation, tokenizer and model configuration under folder; return where they are.

    A byte-level BPE of vocab_size tokens, special ones included, is trained on the training rows. Files of an earlier
    call are replaced.

    Raises:
        OptionError: vocab_size cannot hold the 256 bytes and the special tokens.

    Cost:
        About a second for 5,000 rows.
    """
    check_int("vocab_size", vocab_size, low=300)
    folder = Path(folder)
    files = DemoFiles(train=folder / "train.jsonl", validation=folder / "validation.jsonl", model=folder / "model")
    files.model.mkdir(parents=True, exist_ok=True)
    for path, part in zip(files, rows):
        _write_jsonl(path, part)

    tokenizer = train_tokenizer(rows[0], vocab_size=vocab_size)
    tokenizer.save(str(files.model / "tokenizer.json"))
    config = model_config(
        vocab_size=tokenizer.get_vocab_size(),
        end_id=SPECIAL_TOKENS.index(TURN_END),
        pad_id=SPECIAL_TOKENS.index(END_OF_TEXT),
    )
    _write_json(files.model / "config.json", config)
    _write_json(
        files.model / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": TURN_END,
            "pad_token": END_OF_TEXT,
            "clean_up_tokenization_spaces": False,
        },
    )
    (files.model / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    return files


def train_tokenizer(rows: Iterable[Row], *, vocab_size: int) -> Tokenizer:
    """Return a byte-level BPE trained on the messages of rows; every digit is a token of its own, so that sums
    are learnt digit by digit.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # The role names belong to the template's own words: with them in the corpus each becomes one token.
    corpus = (text for row in rows for message in row["messages"] for text in (message["role"], message["content"]))
    tokenizer.train_from_iterator(corpus, trainer=trainer)
    return tokenizer


def model_config(*, vocab_size: int, end_id: int, pad_id: int) -> dict[str, object]:
    """Return the configuration of a Qwen3 model of 0.65 million parameters, which two CPU cores train in minutes."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": vocab_size,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 3,
        # Many narrow heads and large first weights learn soonest to look numbers up in the question.
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "initializer_range": 0.1,
        "max_position_embeddings": 4096,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": end_id,
        "pad_token_id": pad_id,
        "dtype": "float32",
    }


def _write_jsonl(path: Path, rows: Iterable[Row]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
