import pytest

from lightning_fastft.core.errors import OptionError
from lightning_fastft.packing.rows.formats import FormatOptions, detect_format, find_wrong_mapping


def test_detection_goes_by_columns_and_can_be_overridden():
    options = FormatOptions(max_tokens=8)
    assert detect_format(["messages", "text"], options=options) == "messages"
    assert detect_format(["prompt", "completion", "id"], options=options) == "prompt_completion"
    assert detect_format(["instruction", "output"], options=options) == "instruction"
    assert detect_format(["input_ids"], options=options) == "input_ids"
    assert detect_format(["text", "prompt"], options=options) == "text"
    assert detect_format(["question", "answer"], options=options) is None
    assert detect_format(["messages", "text"], options=FormatOptions(max_tokens=8, format="text")) == "text"
    assert detect_format(["chosen", "rejected", "messages"], options=options) == "preference"
    assert detect_format(["prompt", "completion", "label"], options=options) == "labelled"
    assert detect_format(["prompt", "completion", "score"], options=options) == "scored"
    assert detect_format(["prompt", "completions", "rewards"], options=options) == "rollouts"
    assert detect_format(["prompt_ids", "completion_ids", "rewards"], options=options) == "rollouts"
    assert detect_format(["messages", "rewards"], options=options) == "messages"
    mapped = FormatOptions(max_tokens=8, columns={"completions": "answers"})
    assert detect_format(["prompt", "answers", "rewards"], options=mapped) == "rollouts"


@pytest.mark.parametrize(
    "option",
    [
        {"format": "alpaca"},
        {"loss_on": "prompt"},
        {"too_long": "drop"},
        {"extra_columns": "x"},
        {"columns": {"question": "prompt"}},
        {"max_tokens": 1},
    ],
)
def test_options_outside_are_refused(option):
    with pytest.raises(OptionError):
        FormatOptions(**{"max_tokens": 8, **option})


@pytest.mark.parametrize(
    ("columns", "mapping", "options", "words"),
    [
        (["question", "answer"], {"prompt": "question", "completion": "answer"}, {}, ""),
        (
            ["question", "answer"],
            {"prompt": "question", "completion": "answr"},
            {},
            "completion to 'answr'",
        ),
        (
            ["question", "answer"],
            {"prompt": "zzz", "completion": "answer"},
            {},
            "prompt to 'zzz'",
        ),
        # Alone in its format, and no other is there.
        (["body"], {"text": "bodi"}, {}, "Did you mean 'body'?"),
        # The rows are of a known format, but that is not what was asked for.
        (["question", "answer", "text"], {"prompt": "question", "completion": "answr"}, {}, "Did you mean 'answer'?"),
        (["ids", "labls"], {"input_ids": "ids", "labels": "lables"}, {}, "labels to 'lables'"),
        (["ids"], {"input_ids": "ids", "labels": "lables"}, {"extra_columns": "ignore"}, ""),
        (
            ["question"],
            {"prompt": "question", "completion": "answr"},
            {"format": "prompt_completion"},
            "completion to 'answr'",
        ),
        # One mapping for sources of two formats.
        (["messages"], {"prompt": "question", "completion": "answer"}, {}, ""),
        (["body"], {"prompt": "question", "completion": "answer", "text": "body"}, {}, ""),
        (["messages"], {}, {}, ""),
    ],
)
def test_mapping_to_columns_that_are_not_there_is_named(columns, mapping, options, words):
    found = find_wrong_mapping(columns, options=FormatOptions(max_tokens=8, columns=mapping, **options))
    assert found == words if not words else words in found
