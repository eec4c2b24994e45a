"""R8: bad rows. The rows and the expected results are those of tests/packing/bad_rows.py."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from datasets import load_dataset
from torch.utils.data import DataLoader

from benchmarks.faults import child
from benchmarks.faults.default_stack import DefaultModule, pad
from benchmarks.faults.table import GOOD
from tests.packing.bad_rows import BAD_ROWS, MAX_TOKENS, POSITIONS, VOCAB_SIZE, BadRow, write_corpus
from tests.packing.conftest import MARKED, build_tokenizer
from tests.packing.store.test_cache import test_bad_row_is_answered_and_good_rows_all_arrive as check_ours


def bad_rows(folder: Path, *, stack: str, num_trials: int) -> list[str]:
    """R8: a file of good rows with a bad one among them is loaded and trained for one epoch."""
    cases = [(bad, position) for bad in BAD_ROWS for position in POSITIONS]
    cases = cases[:: max(1, len(cases) // num_trials)][:num_trials]
    tokenizer = build_tokenizer(chat_template=MARKED)
    verdicts = []
    for number, (bad, position) in enumerate(cases):
        place = folder / str(number)
        place.mkdir()
        act = _answer_ours if stack == "ours" else _answer_default
        end = child.run(folder, partial(act, place, bad, position, tokenizer))
        verdicts.append("process died" if end.answer is None else end.answer)
    return verdicts


def _answer_ours(folder: Path, bad: BadRow, position: str, tokenizer: Any) -> str:
    try:
        check_ours(folder, tokenizer, bad, position)
    # pytest's own failure, where nothing was raised, is no Exception.
    except BaseException as error:  # noqa: BLE001
        return f"answered otherwise ({bad.kind}: {type(error).__name__})"
    return GOOD


def _answer_default(folder: Path, bad: BadRow, position: str, tokenizer: Any) -> str:
    path = folder / "rows.jsonl"
    good, line = write_corpus(path, bad, position)

    def tokenise(row: dict[str, Any]) -> dict[str, list[int]]:
        if bad.family == "ids":
            return {name: row[name][:MAX_TOKENS] for name in ("input_ids", "labels")}
        made = tokenizer.apply_chat_template(
            row["messages"], return_dict=True, return_assistant_tokens_mask=True, truncation=True, max_length=MAX_TOKENS
        )
        return {
            "input_ids": made["input_ids"],
            "labels": [token if mask else -100 for token, mask in zip(made["input_ids"], made["assistant_masks"])],
        }

    expected = sorted(tokenise(row)["input_ids"] for row in good)
    # Whatever the libraries raise ends the run.
    try:
        data = load_dataset("json", data_files=str(path), split="train", cache_dir=str(folder / "cache"))
        data = data.map(tokenise, remove_columns=data.column_names)
        module = DefaultModule(vocab_size=VOCAB_SIZE)
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=1,
            default_root_dir=folder,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
            max_epochs=1,
        )
        trainer.fit(module, DataLoader(data, batch_size=16, shuffle=True, collate_fn=pad))
    except Exception as error:  # noqa: BLE001
        if bad.answer == "stop" and path.name in str(error) and f"line {line}" in str(error):
            return GOOD
        return (
            "stopped the run without naming the row"
            if bad.answer == "stop"
            else "ended the whole run, the good rows with it"
        )
    trained = sorted(row for batch in module.rows for row in batch)
    if any(loss != loss for loss in module.losses):
        return "made the loss NaN"
    if any(row not in expected for row in trained) or len(trained) > len(expected):
        return "trained without a word"
    if bad.answer == "stop":
        return "left out without a word"
    return GOOD if trained == expected else "left out together with good rows"
