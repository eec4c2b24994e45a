import numpy as np
import pytest

from lightning_fastft.core.errors import DataError
from lightning_fastft.packing.document import Document
from lightning_fastft.training.data.describe import (
    describe_data,
    render_completions,
    render_example,
    render_length_histogram,
)
from lightning_fastft.training.datamodule import PackedDataModule


class LetterTokenizer:
    """One letter per id."""

    def decode(self, ids, **_):
        return "".join(chr(97 + token_id) for token_id in ids)


def make_data(**options) -> PackedDataModule:
    rows = [{"input_ids": [1, 2, 3, 4], "labels": [-100, -100, 3, 4]}] + [
        {"input_ids": list(range(length)), "labels": list(range(length))} for length in (3, 9, 9)
    ]
    options = {"num_workers": 0, "max_tokens": 16, "cache_dir": None, "num_proc": 1, "show_progress": False, **options}
    data = PackedDataModule(options.pop("rows", rows), **options)
    data.setup("fit")
    return data


def test_description_counts_rows_lengths_packs_and_marks_an_example():
    data = make_data(
        max_reject_share=0.5,
        rows=[
            {"input_ids": [1, 2, 3, 4], "labels": [-100, -100, 3, 4]},
            {"input_ids": [1], "labels": [1]},
            {"input_ids": [5] * 9, "labels": [5] * 9},
        ],
    )
    text = describe_data(data, world_size=2)
    assert "3 rows, 2 examples, 13 tokens" in text
    assert "input_ids 3" in text
    assert "rejected: 1 (33.33 %): fewer than 2 tokens 1" in text
    assert "1 pack of 16 tokens (1 would hold the tokens), fill 81.25 %\n" in text
    assert (
        "an epoch trains 2 packs (1 packed, 1 more by splitting) in 1 optimizer step of 2 packs (2 ranks x "
        "accumulate_grad_batches=1)" in text
    )
    assert "first example: 4 tokens, 2 trained" in text
    assert "1 2 ⟦3 4⟧" in text


def test_description_has_each_split():
    text = describe_data(make_data(val_paths=[{"input_ids": [7] * 5}]))
    assert text.index("train:") < text.index("val:") < text.index("first example")
    assert "1 example, 5 tokens" in text
    assert "test:" not in text


def test_description_tells_optimizer_steps_of_training_and_equal_ranks_of_evaluation():
    text = describe_data(
        make_data(val_paths=[{"input_ids": [7] * 5}, {"input_ids": [8] * 5}]), world_size=2, accumulate=2
    )
    train, _, val = text.partition("val:")
    assert (
        "an epoch trains 4 packs (2 packed, 2 more by splitting) in 1 optimizer step of 4 packs (2 ranks x "
        "accumulate_grad_batches=2)" in train
    )
    assert "2 packs (1 more by splitting), so that 2 ranks get equal numbers" in val
    assert "optimizer step" not in val
    assert "by splitting" not in describe_data(make_data())


def test_description_underlines_on_a_terminal():
    assert "1 2 \x1b[4m3 4\x1b[24m" in describe_data(make_data(), is_terminal=True)


def test_description_refuses_a_module_without_set_up():
    with pytest.raises(DataError, match="setup"):
        describe_data(PackedDataModule([{"input_ids": [1, 2]}]))


def test_example_is_decoded_run_by_run_and_its_first_token_is_never_trained():
    document = Document(np.array([0, 1, 2, 3, 4]), np.array([0, 1, -100, 3, 4]))
    assert render_example(document, LetterTokenizer()) == "a⟦b⟧c⟦de⟧"


def make_document(*, scores):
    ids = np.arange(2 + len(scores))
    labels = np.where(ids < 2, -100, ids)
    return Document(ids, labels, segment_lengths=(2, *[1] * len(scores)), scores=scores)


@pytest.mark.parametrize(
    ("formats", "scores", "names"),
    [
        (["preference", "none"], (0.0, 0.0), ["chosen", "rejected"]),
        (["preference"], (0.5, 0.0), ["chosen, margin 0.5", "rejected"]),
        (["labelled"], (1.0,), ["completion 1, label 1"]),
        (["scored"], (-0.25,), ["completion 1, score -0.25"]),
        (["rollouts"], (1.0, 0.0, 2.5), [f"completion {n}, reward {r}" for n, r in ((1, 1), (2, 0), (3, 2.5))]),
        (["preference", "rollouts"], (1.0, 0.0), ["completion 1, score 1", "completion 2, score 0"]),
    ],
)
def test_prompt_and_completions_are_named(formats, scores, names):
    text = render_completions(make_document(scores=scores), LetterTokenizer(), formats=formats)
    expected = ["prompt (2 tokens):", "ab"]
    for number, name in enumerate(names):
        expected += [f"{name} (1 token):", f"⟦{'cde'[number]}⟧"]
    assert text.splitlines() == expected


def test_long_prompt_leaves_room_for_its_completions():
    document = Document(np.ones(602, np.int64), np.ones(602, np.int64), (), None, (600, 1, 1), (0.0, 0.0))
    text = render_completions(document, None, formats=["preference"])
    assert "430 more tokens" in text
    assert text.endswith("rejected (1 token):\n⟦1⟧")


def test_description_of_completions_counts_what_shared_prompts_save():
    rows = [{"prompt_ids": [1] * 6, "completion_ids": [[2], [3, 4]], "rewards": [1, 0]}] * 10
    data = make_data(rows=rows, val_share=0.3)
    text = describe_data(data)
    num_val = len(data.subset("val"))
    for split, number in (("train", 10 - num_val), ("val", num_val)):
        shared, repeated = number * (5 + 2 + 3), number * (7 + 8)
        assert (
            f"{2 * number} completions: {shared} tokens with shared prompts, {repeated} without, 33.3 % saved"
            in text[text.index(f"{split}:") :]
        )
    assert "completion 2, reward 0 (2 tokens):\n⟦3 4⟧" in text
    assert "shared prompts" not in describe_data(make_data())


def test_long_example_says_what_is_left_out():
    ids = np.ones(600, dtype=np.int64)
    assert render_example(Document(ids, ids), None).endswith("1⟧ ... 88 more tokens")


@pytest.mark.parametrize("lengths", [[5], [5, 5], [1, 2, 3], list(range(1, 500)), [10, 4096]])
def test_text_histogram_counts_every_document(lengths):
    lines = render_length_histogram(np.array(lengths)).splitlines()
    assert sum(int(line.split()[-1]) for line in lines) == len(lengths)
    assert len(lines) <= 12
    assert "#" in lines[0]
