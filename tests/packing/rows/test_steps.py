"""Rows of labelled steps become one example: prompt and steps in a row, trained at the last token of each step."""

import numpy as np
import pytest

from lightning_fastft.packing.rows import rejects
from lightning_fastft.packing.rows.formats import FormatOptions, detect_format
from lightning_fastft.packing.rows.rejects import RowRejectedError
from lightning_fastft.packing.rows.steps import join_steps
from lightning_fastft.packing.store.cache import tokenize_sources
from lightning_fastft.packing.store.dataset import TokenizedDataset
from lightning_fastft.training.data.describe import render_completions
from tests.packing.rows.test_completion_rows import ROLLOUTS, SCORED, STEPS, encode


def pieces(tokenizer, example):
    return [
        tokenizer.decode(ids) for ids in np.split(example.input_ids, np.cumsum(example.completions.segment_lengths))
    ]


def test_steps_are_found_by_their_columns():
    options = FormatOptions(max_tokens=64)
    assert detect_format(list(STEPS), options=options) == "stepwise"
    assert detect_format([*ROLLOUTS, "labels"], options=options) == "stepwise"
    assert detect_format(list(ROLLOUTS), options=options) == "rollouts"


def test_tokens_are_those_of_prompt_steps_and_separators_alone(plain_tokenizer):
    """As TRL's PRMTrainer.tokenize_row joins them, without a token at the ends."""
    example = encode(plain_tokenizer, STEPS, format="stepwise")
    own = [plain_tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("two plus two", "two", "is four")]
    newline = plain_tokenizer("\n", add_special_tokens=False)["input_ids"]
    expected = [own[0], own[1] + newline, own[2] + newline]
    joined = [token for ids in expected for token in ids]
    assert example.input_ids.tolist() == joined
    assert example.completions.segment_lengths == tuple(map(len, expected))
    assert example.completions.scores == (1.0, 0.25)
    assert np.flatnonzero(example.is_trained).tolist() == [len(own[0] + expected[1]) - 1, len(joined) - 1]


def test_separators_are_options(plain_tokenizer):
    example = encode(plain_tokenizer, STEPS, format="stepwise", separator="\n", step_separator=" is")
    assert pieces(plain_tokenizer, example)[:3] == ["two plus two\n", "two is", "is four is"]
    without = encode(plain_tokenizer, STEPS, format="stepwise", step_separator="")
    assert pieces(plain_tokenizer, without)[:3] == ["two plus two", "two", "is four"]
    assert without.is_trained[-1]


@pytest.mark.parametrize("in_memory", [True, False])
def test_a_data_set_keeps_steps_and_cuts_whole_ones(tmp_path, plain_tokenizer, in_memory):
    long = {"prompt": "two", "completions": ["four"] * 30, "labels": [0, 1] * 15}
    options = FormatOptions(max_tokens=24, too_long="truncate")
    cache = None if in_memory else tmp_path
    dataset = tokenize_sources([STEPS, long], tokenizer=plain_tokenizer, options=options, cache_dir=cache)
    if not in_memory:
        dataset = TokenizedDataset.open(dataset.path)
    assert dataset.completions.is_stepwise_N.tolist() == [True, True]
    first, second = dataset
    assert first.is_stepwise
    assert first.scores == (1.0, 0.25)
    whole = encode(plain_tokenizer, long, format="stepwise")
    step = whole.completions.segment_lengths[1]
    num_kept = (24 - whole.completions.segment_lengths[0]) // step
    assert second.segment_lengths == whole.completions.segment_lengths[: num_kept + 1]
    assert second.scores == (0.0, 1.0) * (num_kept // 2) + (0.0,) * (num_kept % 2)
    assert (second.labels != -100).sum() == num_kept == dataset.num_labelled_N[1]


def test_a_prompt_without_room_for_a_step_is_rejected(plain_tokenizer):
    rows = [STEPS] * 3 + [{**STEPS, "prompt": "two " * 40}]
    dataset = tokenize_sources(
        rows, tokenizer=plain_tokenizer, options=FormatOptions(max_tokens=24, too_long="truncate"), max_reject_share=0.5
    )
    assert dataset.report.rejects == {rejects.ALL_MASKED_TRUNCATED: 1}


def test_data_without_steps_has_no_marks_of_them(plain_tokenizer):
    dataset = tokenize_sources([SCORED], tokenizer=plain_tokenizer, options=FormatOptions(max_tokens=24))
    assert "is_stepwise" not in dataset.completions.arrays
    assert not dataset[0].is_stepwise


def test_steps_without_tokens_are_rejected():
    for prompt, steps, reason in (([], [[1]], rejects.NO_PROMPT), ([1], [[2], []], rejects.NO_COMPLETION)):
        with pytest.raises(RowRejectedError, match=reason):
            join_steps(np.array(prompt), [np.array(step) for step in steps], labels=(1.0,) * len(steps))


def test_an_example_shows_each_step_with_its_label(plain_tokenizer):
    (document,) = tokenize_sources([STEPS], tokenizer=plain_tokenizer, options=FormatOptions(max_tokens=64))
    text = render_completions(document, plain_tokenizer, formats=["stepwise"])
    assert "step 1, label 1 (" in text
    assert "step 2, label 0.25 (" in text
    assert text.count("\u27e6") == 2
