"""Each format becomes the text that was meant, and exactly the tokens of the answer are trained."""

import numpy as np
import pytest

from lightning_fastft.core.errors import DataError
from lightning_fastft.packing.rows import rejects
from lightning_fastft.packing.rows.formats import FormatOptions, detect_format
from lightning_fastft.packing.rows.rejects import RowRejectedError
from lightning_fastft.packing.tokens.formatter import Formatter
from lightning_fastft.packing.tokens.token_ids import Encoded, TokenIdError
from tests.packing.conftest import build_tokenizer


def encode(tokenizer, row, *, format, vocab_size=None, **options):
    formatter = Formatter(tokenizer, options=FormatOptions(max_tokens=512, **options), vocab_size=vocab_size)
    return formatter.encode([row], format=format)[0]


def shown(tokenizer, example):
    """The text, trained stretches in brackets."""
    assert isinstance(example, Encoded), example
    edges = np.flatnonzero(np.diff(example.is_trained.astype(int), prepend=0, append=0))
    text, last = "", 0
    for place, edge in enumerate(edges):
        text += tokenizer.decode(example.input_ids[last:edge]) + "[]"[place % 2]
        last = edge
    return text + tokenizer.decode(example.input_ids[last:])


@pytest.mark.parametrize(
    ("row", "format", "text"),
    [
        ({"text": "two plus two"}, "text", "[two plus two<|endoftext|>]"),
        (
            {"prompt": "two plus two", "completion": " is four"},
            "prompt_completion",
            "two plus two[ is four<|endoftext|>]",
        ),
        ({"prompt": "two:", "completion": "four<|endoftext|>"}, "prompt_completion", "two:[four<|endoftext|>]"),
        (
            {"instruction": "add", "output": "four"},
            "instruction",
            "### Instruction:\nadd\n\n### Response:\n[four<|endoftext|>]",
        ),
        (
            {"instruction": "add", "input": "two two", "output": "four"},
            "instruction",
            "### Instruction:\nadd\n\n### Input:\ntwo two\n\n### Response:\n[four<|endoftext|>]",
        ),
    ],
)
def test_plain_formats_train_the_answer_and_the_end(plain_tokenizer, row, format, text):
    assert shown(plain_tokenizer, encode(plain_tokenizer, row, format=format)) == text
    everything = encode(plain_tokenizer, row, format=format, loss_on="all")
    assert everything.is_trained.all()


def test_separator_stands_between_prompt_and_completion_and_is_context(plain_tokenizer):
    row = {"prompt": "two", "completion": "four"}
    assert (
        shown(plain_tokenizer, encode(plain_tokenizer, row, format="prompt_completion", separator="\n"))
        == "two\n[four<|endoftext|>]"
    )


def test_eos_can_be_left_out_and_missing_eos_is_no_error(plain_tokenizer):
    row = {"prompt": "two", "completion": " four"}
    assert (
        shown(plain_tokenizer, encode(plain_tokenizer, row, format="prompt_completion", add_eos=False)) == "two[ four]"
    )
    without = build_tokenizer(eos_token=None)
    assert shown(without, encode(without, row, format="prompt_completion")) == "two[ four]"


def test_first_token_of_the_tokenizer_is_put_in_front_once(plain_tokenizer):
    tokenizer = build_tokenizer(bos_token="<s>")
    row = {"prompt": "two", "completion": " four"}
    assert shown(tokenizer, encode(tokenizer, row, format="prompt_completion")) == "<s>two[ four<|endoftext|>]"
    row = {"prompt": "<s>two", "completion": " four"}
    assert shown(tokenizer, encode(tokenizer, row, format="prompt_completion")) == "<s>two[ four<|endoftext|>]"


@pytest.mark.parametrize(
    ("prompt", "completion"), [("two plus t", "wo"), ("two plus ", "two"), ("two plus  ", "  two")]
)
def test_token_across_the_border_is_tokenised_as_a_prompt_would_be(plain_tokenizer, prompt, completion):
    formatter = Formatter(plain_tokenizer, options=FormatOptions(max_tokens=64))
    example = formatter.encode([{"prompt": prompt, "completion": completion}], format="prompt_completion")[0]
    assert shown(plain_tokenizer, example) == f"{prompt}[{completion}<|endoftext|>]"
    num_prompt = int(np.flatnonzero(example.is_trained)[0])
    assert example.input_ids[:num_prompt].tolist() == plain_tokenizer(prompt)["input_ids"]
    assert sum(formatter.notes.values()) == 1


@pytest.mark.parametrize("prompt", ["two plus\n\n", "two  ", "two\n\n\n", "two\n \n"])
def test_white_space_at_the_end_of_a_prompt_is_tokenised_as_a_prompt_would_be(prompt):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # Before a word, byte-level pre-tokenizers keep the last white space apart: here the pair is no token.
    letters = [*pre_tokenizers.ByteLevel.alphabet(), "ĊĊ", "ĠĠ"]
    built = Tokenizer(models.BPE({letter: place for place, letter in enumerate(letters)}, [("Ċ", "Ċ"), ("Ġ", "Ġ")]))
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=built)
    formatter = Formatter(tokenizer, options=FormatOptions(max_tokens=64))
    (example,) = formatter.encode([{"prompt": prompt, "completion": "four"}], format="prompt_completion")
    assert shown(tokenizer, example) == f"{prompt}[four]"
    num_prompt = int(np.flatnonzero(example.is_trained)[0])
    assert example.input_ids[:num_prompt].tolist() == tokenizer(prompt)["input_ids"]


def test_clean_border_is_tokenised_whole(plain_tokenizer):
    formatter = Formatter(plain_tokenizer, options=FormatOptions(max_tokens=64))
    example = formatter.encode([{"prompt": "two plus two", "completion": " is four"}], format="prompt_completion")[0]
    assert example.input_ids[:-1].tolist() == plain_tokenizer("two plus two is four")["input_ids"]
    assert not formatter.notes


def test_parts_that_do_not_add_up_leave_the_crossing_token_untrained():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # Puts a mark in front of every text, as many SentencePiece tokenizers do, so that parts have one more than the
    # whole.
    vocab = {"▁": 0, "t": 1, "w": 2, "o": 3, "▁t": 4, "▁tw": 5, "▁two": 6, "<unk>": 7}
    built = Tokenizer(models.BPE(vocab, [("▁", "t"), ("▁t", "w"), ("▁tw", "o")], unk_token="<unk>"))
    built.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    built.decoder = decoders.Metaspace(prepend_scheme="never")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=built, unk_token="<unk>")
    formatter = Formatter(tokenizer, options=FormatOptions(max_tokens=64))
    example = formatter.encode([{"prompt": "tw", "completion": "o two"}], format="prompt_completion")[0]
    assert example.input_ids.tolist() == [6, 6]
    assert example.is_trained.tolist() == [False, True]
    assert "not trained" in next(iter(formatter.notes))


def test_slow_tokenizer_finds_the_border_by_tokenising_the_prompt(plain_tokenizer):
    class Slow:
        """The same tokens without offsets."""

        is_fast = False
        eos_token_id = plain_tokenizer.eos_token_id
        chat_template = None

        def __call__(self, text, **kwargs):
            return {"input_ids": plain_tokenizer(text, add_special_tokens=False)["input_ids"]}

        def decode(self, ids, **kwargs):
            return plain_tokenizer.decode(ids)

    for prompt, completion in (("two plus two", " is four"), ("two plus t", "wo")):
        row = {"prompt": prompt, "completion": completion}
        slow, fast = (encode(tokenizer, row, format="prompt_completion") for tokenizer in (Slow(), plain_tokenizer))
        assert slow.input_ids.tolist() == fast.input_ids.tolist()
        assert slow.is_trained.tolist() == fast.is_trained.tolist()


def test_characters_of_several_bytes_stay_whole(plain_tokenizer):
    row = {"prompt": "€", "completion": "€\U0001f600é"}
    assert (
        shown(plain_tokenizer, encode(plain_tokenizer, row, format="prompt_completion"))
        == "€[€\U0001f600é<|endoftext|>]"
    )


def test_ids_are_taken_as_they_are():
    row = {"input_ids": [3, 4, 5], "labels": [-100, 4, -100]}
    example = encode(None, row, format="input_ids")
    assert example.input_ids.tolist() == [3, 4, 5]
    assert example.is_trained.tolist() == [False, True, False]
    assert encode(None, {"input_ids": [3, 4]}, format="input_ids").is_trained.all()
    assert encode(None, {"input_ids": [3, 4], "attention_mask": [1, 1]}, format="input_ids").is_trained.all()
    assert encode(None, row, format="input_ids", loss_on="all").is_trained.all()
    assert encode(None, {"input_ids": np.array([3, 4], dtype=np.int32)}, format="input_ids").input_ids.dtype == np.int64


@pytest.mark.parametrize(
    ("columns", "trained"),
    [
        ({"completion_mask": [0, 1, 1]}, [False, True, True]),
        ({"assistant_masks": np.array([False, True, False])}, [False, True, False]),
        ({"completion_mask": [0, 1, 1], "assistant_masks": [True, True, False]}, [False, True, False]),
        # As in TRL, labels decide alone.
        ({"completion_mask": [0, 1, 1], "labels": [-100, -100, 5]}, [False, False, True]),
    ],
)
def test_masks_of_trl_decide_which_ids_are_trained(columns, trained):
    row = {"input_ids": [3, 4, 5], **columns}
    assert encode(None, row, format="input_ids").is_trained.tolist() == trained
    assert encode(None, row, format="input_ids", loss_on="all").is_trained.all()


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"input_ids": "345"}, rejects.WRONG_TYPE),
        ({"input_ids": [3, 4], "completion_mask": [0, 2]}, rejects.WRONG_TYPE),
        ({"input_ids": [3, 4], "completion_mask": [0, 1.0]}, rejects.WRONG_TYPE),
        ({"input_ids": [3, 4], "completion_mask": [[0], [1]]}, rejects.WRONG_TYPE),
        ({"input_ids": [3, 4], "completion_mask": "01"}, rejects.LENGTHS_DIFFER),
        ({"input_ids": [3, 4], "assistant_masks": [1]}, rejects.LENGTHS_DIFFER),
        ({"input_ids": [3, 4.0]}, rejects.WRONG_TYPE),
        ({"input_ids": [3, True]}, rejects.WRONG_TYPE),
        ({"input_ids": [3, 4], "labels": [3]}, rejects.LABELS_DIFFER),
        ({"input_ids": [3, 4, 5], "labels": [4, 5, -100]}, rejects.LABELS_DIFFER),
        ({"input_ids": [3, 4, 0], "attention_mask": [1, 1, 0]}, rejects.PADDED),
        ({"input_ids": [3, 4, 0], "attention_mask": [1, 1]}, rejects.LENGTHS_DIFFER),
    ],
)
def test_wrong_ids_are_rejected(row, reason):
    outcome = encode(None, row, format="input_ids", vocab_size=10)
    assert isinstance(outcome, RowRejectedError)
    assert outcome.reason == reason


@pytest.mark.parametrize(
    "row",
    [
        {"input_ids": [3, -1]},
        {"input_ids": [3, 10]},
        {"input_ids": [3, 4], "labels": [-1, 4]},
        {"input_ids": [3, 4], "labels": [10, 4]},
    ],
)
def test_impossible_ids_are_told_apart_from_bad_rows(row):
    assert isinstance(encode(None, row, format="input_ids", vocab_size=10), TokenIdError)


@pytest.mark.parametrize(
    ("row", "format", "reason"),
    [
        ({"prompt": "a", "completion": ""}, "prompt_completion", rejects.EMPTY_TEXT),
        ({"prompt": "a", "completion": 4}, "prompt_completion", rejects.WRONG_TYPE),
        (
            {"prompt": "a", "completion": [{"role": "assistant", "content": "b"}]},
            "prompt_completion",
            rejects.WRONG_TYPE,
        ),
        ({"text": " \n"}, "text", rejects.EMPTY_TEXT),
        ({"text": None}, "text", rejects.WRONG_TYPE),
        ({"text": "a\0"}, "text", rejects.NUL),
        ({"instruction": "a", "input": 3, "output": "b"}, "instruction", rejects.WRONG_TYPE),
    ],
)
def test_bad_text_is_rejected_and_neighbours_are_not(plain_tokenizer, row, format, reason):
    good = {"prompt": "a", "completion": "b", "text": "a", "instruction": "a", "output": "b"}
    formatter = Formatter(plain_tokenizer, options=FormatOptions(max_tokens=64))
    before, outcome, after = formatter.encode([good, row, good], format=format)
    assert outcome.reason == reason
    assert before.input_ids.tolist() == after.input_ids.tolist()


def test_format_that_cannot_be_served_is_named(plain_tokenizer):
    with pytest.raises(DataError, match="chat template"):
        Formatter(plain_tokenizer, options=FormatOptions(max_tokens=8)).check_can_serve("messages", file="a.jsonl")
    with pytest.raises(DataError, match="tokenizer"):
        Formatter(None, options=FormatOptions(max_tokens=8)).check_can_serve("text", file="a.jsonl")


def test_conversational_prompt_and_completion_train_the_completion(marked_tokenizer, unmarked_tokenizer):
    prompt = [
        {"role": "user", "content": "two"},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "plus"},
    ]
    row = {"prompt": prompt, "completion": [{"role": "assistant", "content": "four"}]}
    texts = {
        shown(tokenizer, encode(tokenizer, row, format="prompt_completion"))
        for tokenizer in (marked_tokenizer, unmarked_tokenizer)
    }
    assert texts == {
        "<|im_start|>user\ntwo<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n<|im_start|>user\nplus<|im_end|>\n<|im_start|>assistant\n[four<|im_end|>]\n"
    }


@pytest.mark.parametrize(
    ("row", "text"),
    [
        (
            {"conversations": [{"from": "human", "value": "two"}, {"from": "gpt", "value": "four"}]},
            "<|im_start|>user\ntwo<|im_end|>\n<|im_start|>assistant\n[four<|im_end|>]\n",
        ),
        (
            {
                "conversations": [
                    {"from": "user", "value": "two", "weight": None},
                    {"from": "chatgpt", "value": "four"},
                ],
                "system": "be brief",
            },
            "<|im_start|>system\nbe "
            "brief<|im_end|>\n<|im_start|>user\ntwo<|im_end|>\n<|im_start|>assistant\n[four<|im_end|>]\n",
        ),
        (
            {
                "conversations": [{"role": "user", "content": "two"}, {"role": "assistant", "content": "four"}],
                "system": "",
            },
            "<|im_start|>user\ntwo<|im_end|>\n<|im_start|>assistant\n[four<|im_end|>]\n",
        ),
        (
            {
                "conversations": [
                    {"from": "system", "value": "be brief"},
                    {"from": "human", "value": "two"},
                    {"from": "gpt", "value": "four"},
                ]
            },
            "<|im_start|>system\nbe "
            "brief<|im_end|>\n<|im_start|>user\ntwo<|im_end|>\n<|im_start|>assistant\n[four<|im_end|>]\n",
        ),
    ],
)
def test_conversations_of_sharegpt_train_the_assistants_turns(marked_tokenizer, row, text):
    assert detect_format(list(row), options=FormatOptions(max_tokens=8)) == "conversations"
    assert shown(marked_tokenizer, encode(marked_tokenizer, row, format="conversations")) == text


@pytest.mark.parametrize(
    ("row", "reason", "detail"),
    [
        (
            {"conversations": [{"from": "human", "value": "two"}, {"from": "parrot", "value": "four"}]},
            rejects.UNKNOWN_ROLE,
            "'parrot' in conversations[1]",
        ),
        ({"conversations": [{"from": 1, "value": "two"}]}, rejects.UNKNOWN_ROLE, "1 in conversations[0]"),
        ({"conversations": [{"from": "human", "value": "two"}]}, rejects.NO_ASSISTANT, "user"),
        ({"conversations": [{"from": "gpt"}]}, rejects.WRONG_TYPE, "conversations[0] has no content"),
        ({"conversations": [{"value": "two"}]}, rejects.WRONG_TYPE, "conversations[0].role"),
        ({"conversations": ["two"]}, rejects.WRONG_TYPE, "conversations[0] must be an object"),
        ({"conversations": "two"}, rejects.WRONG_TYPE, "conversations must be a list"),
        ({"conversations": []}, rejects.EMPTY_MESSAGES, "conversations"),
        (
            {"conversations": [{"from": "system", "value": "a"}, {"from": "gpt", "value": "b"}], "system": "c"},
            rejects.WRONG_TYPE,
            "system column",
        ),
    ],
)
def test_conversations_that_cannot_be_read_are_rejected_with_the_place(marked_tokenizer, row, reason, detail):
    outcome = encode(marked_tokenizer, row, format="conversations")
    assert isinstance(outcome, RowRejectedError)
    assert outcome.reason == reason
    assert detail in outcome.detail
