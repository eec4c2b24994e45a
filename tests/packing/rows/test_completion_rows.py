"""Rows with completions become one example: the prompt once, then each completion as it would be alone behind it."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from lightning_fastft.core.errors import DataError, OptionError
from lightning_fastft.packing.rows import rejects
from lightning_fastft.packing.rows.completion_rows import cut_completions, join_completions
from lightning_fastft.packing.rows.formats import COLUMNS, TUNERS, FormatOptions
from lightning_fastft.packing.rows.rejects import RowRejectedError
from lightning_fastft.packing.store.cache import tokenize_sources
from lightning_fastft.packing.tokens.formatter import Formatter
from lightning_fastft.packing.tokens.token_ids import Encoded, TokenIdError
from tests.packing.conftest import MARKED, UNMARKED, build_tokenizer
from tests.packing.tokens.test_chat import STRICT, THINKING

SHARED = Path(__file__).parents[4] / "shared" / "data"
ASKED = {"role": "user", "content": "two plus two"}
FOUR, FIVE = ({"role": "assistant", "content": word} for word in ("four", "five"))
TEXT_PAIR = {"prompt": "two plus two", "chosen": " is four", "rejected": " is five"}
CHAT_PAIR = {"prompt": [ASKED], "chosen": [FOUR], "rejected": [FIVE]}
IDS = {"prompt_ids": [1, 2], "completion_ids": [[3, 4], [5]], "rewards": [1, 0.5]}


def encode(tokenizer, row, *, format, vocab_size=None, **options):
    formatter = Formatter(tokenizer, options=FormatOptions(max_tokens=512, **options), vocab_size=vocab_size)
    return formatter.encode([row], format=format)[0]


def segments(example):
    """The ids of the prompt and of each completion, and the trained flags of each."""
    assert isinstance(example, Encoded), example
    cuts = np.cumsum(example.completions.segment_lengths)
    assert cuts[-1] == len(example.input_ids)
    ids, is_trained = (np.split(values, cuts[:-1]) for values in (example.input_ids, example.is_trained))
    assert not is_trained[0].any()
    return [part.tolist() for part in ids], [part.tolist() for part in is_trained]


def shown(tokenizer, example):
    """The text of each segment, trained tokens in brackets."""
    texts = []
    for ids, is_trained in zip(*segments(example)):
        edges = np.flatnonzero(np.diff(np.array(is_trained, dtype=int), prepend=0, append=0)).tolist()
        text, last = "", 0
        for place, edge in enumerate(edges):
            text += tokenizer.decode(ids[last:edge]) + "[]"[place % 2]
            last = edge
        texts.append(text + tokenizer.decode(ids[last:]))
    return texts


@pytest.mark.parametrize(
    ("row", "format", "texts", "scores"),
    [
        (TEXT_PAIR, "preference", ["two plus two", "[ is four<eos>]", "[ is five<eos>]"], (0.0, 0.0)),
        (
            {**TEXT_PAIR, "margin": 2},
            "preference",
            ["two plus two", "[ is four<eos>]", "[ is five<eos>]"],
            (2.0, 0.0),
        ),
        (
            {"prompt": "two", "completion": " four", "label": True},
            "labelled",
            ["two", "[ four<eos>]"],
            (1.0,),
        ),
        ({"prompt": "two", "completion": " four", "label": 0}, "labelled", ["two", "[ four<eos>]"], (0.0,)),
        ({"prompt": "two", "completion": " four", "score": -0.5}, "scored", ["two", "[ four<eos>]"], (-0.5,)),
        (
            {"prompt": "two", "completions": [" four", " four", " is"], "rewards": [1, 1, 0.25]},
            "rollouts",
            ["two", "[ four<eos>]", "[ four<eos>]", "[ is<eos>]"],
            (1.0, 1.0, 0.25),
        ),
    ],
)
def test_strings_become_a_prompt_and_trained_completions(plain_tokenizer, row, format, texts, scores):
    example = encode(plain_tokenizer, row, format=format)
    assert shown(plain_tokenizer, example) == [text.replace("<eos>", "<|endoftext|>") for text in texts]
    assert example.completions.scores == scores
    assert example.completions.log_probs is None


@pytest.mark.parametrize(
    "template", [MARKED, UNMARKED, STRICT, THINKING], ids=["marked", "unmarked", "strict", "think"]
)
@pytest.mark.parametrize(
    "answers",
    [
        [[FOUR], [FIVE]],
        [[FOUR], [FIVE, {"role": "user", "content": "plus"}, FOUR]],
        [[{"role": "assistant", "content": "<think>\nplus\n</think>\n\nfour"}], [FIVE], [FOUR]],
    ],
    ids=["one turn", "several turns", "thoughts"],
)
def test_prompt_and_completion_are_the_conversation_alone(template, answers):
    tokenizer = build_tokenizer(chat_template=template)
    example = encode(
        tokenizer, {"prompt": [ASKED], "completions": answers, "rewards": [0] * len(answers)}, format="rollouts"
    )
    (prompt, *completions), (_, *is_trained) = segments(example)
    assert tokenizer.decode(prompt).startswith(tokenizer.apply_chat_template([ASKED], tokenize=False))
    for answer, ids, flags in zip(answers, completions, is_trained):
        whole = tokenizer.apply_chat_template([ASKED, *answer], tokenize=True, return_dict=True)["input_ids"]
        assert prompt + ids == whole
        alone = encode(tokenizer, {"prompt": [ASKED], "completion": answer}, format="prompt_completion")
        assert [False] * len(prompt) + flags == alone.is_trained.tolist()


def test_prompt_that_a_template_renders_differently_is_shared_up_to_there():
    tokenizer = build_tokenizer(chat_template="<s>two plus {{ messages | length }} " + MARKED)
    several = [FIVE, {"role": "user", "content": "plus"}, FOUR]
    row = {"prompt": [ASKED], "completions": [[FOUR], several], "rewards": [1, 0]}
    (prompt, *completions), _ = segments(encode(tokenizer, row, format="rollouts"))
    assert tokenizer.decode(prompt).startswith("<s>two plus")
    assert "user" not in tokenizer.decode(prompt)
    for ids, answer in zip(completions, row["completions"]):
        whole = tokenizer.apply_chat_template([ASKED, *answer], tokenize=True, return_dict=True)["input_ids"]
        assert prompt + ids == whole


def test_texts_are_counted_as_plain_where_there_is_a_chat_template(marked_tokenizer, plain_tokenizer):
    texts = {"prompt": "How many?", "chosen": " Two.", "rejected": " Three or four."}

    def report(tokenizer, *rows):
        return tokenize_sources(list(rows), tokenizer=tokenizer, options=FormatOptions(max_tokens=64)).report

    assert report(marked_tokenizer, texts, texts).is_plain
    assert not report(marked_tokenizer, texts, CHAT_PAIR).is_plain
    assert not report(plain_tokenizer, texts).is_plain


def test_generation_prompt_is_shared(unmarked_tokenizer):
    example = encode(unmarked_tokenizer, CHAT_PAIR, format="preference")
    assert shown(unmarked_tokenizer, example) == [
        "<|im_start|>user\ntwo plus two<|im_end|>\n<|im_start|>assistant\n",
        "[four<|im_end|>]\n",
        "[five<|im_end|>]\n",
    ]


@pytest.mark.parametrize(
    "row",
    [
        {**CHAT_PAIR, "chosen": FOUR, "rejected": FIVE},
        {"chosen": [ASKED, FOUR], "rejected": [ASKED, FIVE]},
        {"prompt": "two plus two", "chosen": [ASKED, FOUR], "rejected": [ASKED, FIVE]},
    ],
    ids=["one message", "implicit", "question as a string too"],
)
def test_other_forms_of_a_conversation_give_the_same_example(unmarked_tokenizer, row):
    expected, found = (encode(unmarked_tokenizer, one, format="preference") for one in (CHAT_PAIR, row))
    assert segments(found) == segments(expected)


def test_implicit_prompt_ends_before_the_first_turn_that_differs(marked_tokenizer):
    more = {"role": "user", "content": "plus"}
    example = encode(
        marked_tokenizer,
        {"chosen": [ASKED, FOUR, more, FOUR], "rejected": [ASKED, FOUR, more, FIVE]},
        format="preference",
    )
    prompt, chosen, rejected = shown(marked_tokenizer, example)
    assert prompt.endswith("plus<|im_end|>\n<|im_start|>assistant\n")
    assert (chosen, rejected) == ("[four<|im_end|>]\n", "[five<|im_end|>]\n")


@pytest.mark.parametrize(
    ("chosen", "rejected", "texts"),
    [
        ("two: four", "two: five", ["two:", "[ four]", "[ five]"]),
        ("two: found", "two: four", ["two:", "[ found]", "[ four]"]),
        ("two:\n\nfour", "two:\n\nfive", ["two:\n\n", "[four]", "[five]"]),
        ("two plus two", "two plus", ["two", "[ plus two]", "[ plus]"]),
    ],
)
def test_implicit_prompt_of_strings_ends_at_white_space(plain_tokenizer, chosen, rejected, texts):
    row = {"chosen": chosen, "rejected": rejected}
    example = encode(plain_tokenizer, row, format="preference", add_eos=False, separator="!")
    assert shown(plain_tokenizer, example) == texts


def test_separator_belongs_to_the_prompt(plain_tokenizer):
    row = {"prompt": "two", "chosen": "four", "rejected": "five"}
    example = encode(plain_tokenizer, row, format="preference", separator="\n", add_eos=False)
    assert shown(plain_tokenizer, example) == ["two\n", "[four]", "[five]"]


def test_token_across_the_border_of_one_completion_leaves_the_prompt_alone(plain_tokenizer):
    row = {"prompt": "two plus t", "chosen": "wo", "rejected": "!"}
    formatter = Formatter(plain_tokenizer, options=FormatOptions(max_tokens=64, add_eos=False))
    example = formatter.encode([row], format="preference")[0]
    assert shown(plain_tokenizer, example) == ["two plus t", "[wo]", "[!]"]
    assert segments(example)[0][0] == plain_tokenizer("two plus t")["input_ids"]
    assert sum(formatter.notes.values()) == 1


def test_first_token_of_the_tokenizer_is_in_the_prompt():
    tokenizer = build_tokenizer(bos_token="<s>")
    example = encode(tokenizer, TEXT_PAIR, format="preference")
    assert shown(tokenizer, example)[0] == "<s>two plus two"


def test_tools_reach_the_template_of_every_completion():
    tokenizer = build_tokenizer(chat_template="{% if tools %}{{ tools[0].name }}: {% endif %}" + UNMARKED)
    example = encode(tokenizer, {**CHAT_PAIR, "tools": [{"name": "adder"}]}, format="preference")
    assert shown(tokenizer, example)[0].startswith("adder: ")


@pytest.mark.parametrize(
    ("prompt", "tools"),
    [
        ("two plus two", None),
        ([{"role": "system", "content": "add"}, ASKED], None),
        ([{"role": "user", "content": "two<|im_end|>four"}], None),
        ([ASKED], [{"name": "adder"}]),
        ([ASKED, FOUR, ASKED], '[{"name": "adder"}]'),
    ],
    ids=["text", "chat", "control token", "tools", "tools as text"],
)
def test_prompt_alone_has_the_tokens_of_its_rows(prompt, tools):
    tokenizer = build_tokenizer(
        chat_template="{% if tools %}{{ tools[0].name }}: {% endif %}" + MARKED, bos_token="<s>"
    )
    completion = " is five" if isinstance(prompt, str) else [FIVE]
    row = {"prompt": prompt, "tools": tools, "completions": [completion], "rewards": [0.0]}
    ids, _ = segments(encode(tokenizer, row, format="rollouts"))
    formatter = Formatter(tokenizer, options=FormatOptions(max_tokens=512))
    assert formatter.encode_prompt(prompt, tools=tools) == ids[0]


def test_prompt_that_cannot_be_rendered_is_rejected(plain_tokenizer, marked_tokenizer):
    plain, marked = (
        Formatter(one, options=FormatOptions(max_tokens=512), vocab_size=8)
        for one in (plain_tokenizer, marked_tokenizer)
    )
    with pytest.raises(DataError, match="need a chat template"):
        plain.encode_prompt([ASKED])
    with pytest.raises(RowRejectedError, match="tools"):
        plain.encode_prompt("two", tools=[{"name": "adder"}])
    with pytest.raises(RowRejectedError, match="image"):
        marked.encode_prompt([{"role": "user", "content": [{"type": "image", "path": "a.png"}]}])
    with pytest.raises(TokenIdError, match="8 rows"):
        marked.encode_prompt([ASKED])


def test_ids_of_rollouts_are_taken_as_they_are():
    example = encode(None, {**IDS, "log_probs": [[-1, -2.5], [0.0]]}, format="rollouts")
    assert segments(example) == ([[1, 2], [3, 4], [5]], [[False, False], [True, True], [True]])
    assert example.completions.scores == (1.0, 0.5)
    assert example.completions.log_probs.tolist() == [0, 0, -1, -2.5, 0]
    assert example.completions.log_probs.dtype == np.float32
    arrays = {**IDS, "completion_ids": [np.array([3, 4]), np.array([5])], "rewards": np.array([1, 0.5], np.float32)}
    assert segments(encode(None, arrays, format="rollouts")) == segments(example)
    assert encode(None, arrays, format="rollouts").completions.log_probs is None


@pytest.mark.parametrize("ids", [{"prompt_ids": [1, 10]}, {"completion_ids": [[3, 4], [-1]]}])
def test_impossible_ids_of_rollouts_are_told_apart_from_bad_rows(ids):
    assert isinstance(encode(None, {**IDS, **ids}, format="rollouts", vocab_size=10), TokenIdError)


STEPS = {"prompt": "two plus two", "completions": ["two", "is four"], "labels": [True, 0.25]}
SCORED = {"prompt": "two", "completion": "four", "score": 1}
LABELLED = {"prompt": "two", "completion": "four", "label": 1}
ROLLOUTS = {"prompt": "two", "completions": ["four", "five"], "rewards": [1, 0]}
PIXEL = {"role": "user", "content": [{"type": "image", "url": "a.png"}]}
HOSTILE = [
    ("preference", {**TEXT_PAIR, "rejected": " is four"}, rejects.SAME_COMPLETIONS),
    ("preference", {"chosen": "two four", "rejected": "two four"}, rejects.SAME_COMPLETIONS),
    ("preference", {**CHAT_PAIR, "rejected": FOUR}, rejects.SAME_COMPLETIONS),
    ("preference", {"chosen": [ASKED, FOUR], "rejected": [ASKED, FOUR]}, rejects.SAME_COMPLETIONS),
    ("preference", {"chosen": "four", "rejected": "five"}, rejects.NO_PROMPT),
    ("preference", {"chosen": " four", "rejected": " five"}, rejects.NO_PROMPT),
    ("preference", {"chosen": [FOUR], "rejected": [FIVE]}, rejects.NO_PROMPT),
    ("preference", {"chosen": "two\nfour", "rejected": "two\n"}, rejects.NO_COMPLETION),
    ("preference", {"chosen": [ASKED, FOUR], "rejected": [ASKED, FOUR, ASKED, FOUR]}, rejects.NO_COMPLETION),
    ("preference", {"chosen": [ASKED, FOUR], "rejected": [ASKED, ASKED]}, rejects.NO_ASSISTANT),
    (
        "preference",
        {"chosen": [FOUR, ASKED, FOUR], "rejected": [FOUR, {**ASKED, "content": "x"}]},
        rejects.NO_ASSISTANT,
    ),
    ("preference", {**TEXT_PAIR, "chosen": " "}, rejects.EMPTY_TEXT),
    ("preference", {**TEXT_PAIR, "prompt": ""}, rejects.EMPTY_TEXT),
    ("preference", {**TEXT_PAIR, "chosen": [FOUR]}, rejects.WRONG_TYPE),
    ("preference", {**CHAT_PAIR, "rejected": "five"}, rejects.WRONG_TYPE),
    (
        "preference",
        {**CHAT_PAIR, "prompt": "other", "chosen": [ASKED, FOUR], "rejected": [ASKED, FIVE]},
        rejects.WRONG_TYPE,
    ),
    ("preference", {**CHAT_PAIR, "prompt": 3}, rejects.WRONG_TYPE),
    ("preference", {**CHAT_PAIR, "prompt": []}, rejects.EMPTY_MESSAGES),
    ("preference", {**TEXT_PAIR, "margin": "2"}, rejects.WRONG_TYPE),
    ("preference", {**TEXT_PAIR, "margin": float("nan")}, rejects.NOT_FINITE),
    ("preference", {**TEXT_PAIR, "tools": [{"name": "adder"}]}, rejects.WRONG_TYPE),
    ("preference", {**TEXT_PAIR, "images": ["a.png"]}, rejects.IMAGE_WITH_COMPLETIONS),
    ("preference", {**CHAT_PAIR, "prompt": [PIXEL]}, rejects.IMAGE_WITH_COMPLETIONS),
    ("preference", {**CHAT_PAIR, "chosen": [{**FOUR, "weight": 0}]}, rejects.ALL_MASKED),
    ("labelled", {**LABELLED, "label": 2}, rejects.WRONG_TYPE),
    ("labelled", {**LABELLED, "label": 1.0}, rejects.WRONG_TYPE),
    ("labelled", {**LABELLED, "label": "true"}, rejects.WRONG_TYPE),
    ("stepwise", {**STEPS, "prompt": [ASKED]}, rejects.WRONG_TYPE),
    ("stepwise", {**STEPS, "prompt": " "}, rejects.EMPTY_TEXT),
    ("stepwise", {**STEPS, "completions": "two four"}, rejects.WRONG_TYPE),
    ("stepwise", {**STEPS, "completions": ["two", 4]}, rejects.WRONG_TYPE),
    ("stepwise", {**STEPS, "completions": ["two", ""]}, rejects.EMPTY_TEXT),
    ("stepwise", {**STEPS, "completions": [], "labels": []}, rejects.NO_COMPLETION),
    ("stepwise", {**STEPS, "labels": [True]}, rejects.LENGTHS_DIFFER),
    ("stepwise", {**STEPS, "labels": [True, "+"]}, rejects.WRONG_TYPE),
    ("stepwise", {**STEPS, "labels": [True, None]}, rejects.WRONG_TYPE),
    ("stepwise", {**STEPS, "labels": True}, rejects.WRONG_TYPE),
    ("stepwise", {**STEPS, "labels": [1, -1]}, rejects.NOT_A_SHARE),
    ("stepwise", {**STEPS, "labels": [1, float("nan")]}, rejects.NOT_A_SHARE),
    ("scored", {**SCORED, "score": True}, rejects.WRONG_TYPE),
    ("scored", {**SCORED, "score": 1e39}, rejects.NOT_FINITE),
    ("scored", {**SCORED, "score": 10**400}, rejects.NOT_FINITE),
    ("scored", {**SCORED, "completion": "a\0"}, rejects.NUL),
    ("rollouts", {**ROLLOUTS, "rewards": [1]}, rejects.LENGTHS_DIFFER),
    ("rollouts", {**ROLLOUTS, "rewards": 1}, rejects.WRONG_TYPE),
    ("rollouts", {**ROLLOUTS, "rewards": [1, None]}, rejects.WRONG_TYPE),
    ("rollouts", {**ROLLOUTS, "completions": [], "rewards": []}, rejects.NO_COMPLETION),
    ("rollouts", {**ROLLOUTS, "completions": "four"}, rejects.WRONG_TYPE),
    ("rollouts", {**ROLLOUTS, "completions": ["four", ""]}, rejects.EMPTY_TEXT),
    ("rollouts", {**ROLLOUTS, "log_probs": [[-1.0], [-1.0]]}, rejects.WRONG_TYPE),
    ("rollouts", {"prompt": "two", "completion_ids": [[1]], "rewards": [1]}, rejects.MISSING_COLUMN),
    ("rollouts", {**IDS, "prompt_ids": []}, rejects.NO_PROMPT),
    ("rollouts", {**IDS, "prompt_ids": "12"}, rejects.WRONG_TYPE),
    ("rollouts", {**IDS, "completion_ids": [[3], []]}, rejects.NO_COMPLETION),
    ("rollouts", {**IDS, "rewards": [1, 0, 1]}, rejects.LENGTHS_DIFFER),
    ("rollouts", {**IDS, "log_probs": [[-1, -1]]}, rejects.LENGTHS_DIFFER),
    ("rollouts", {**IDS, "log_probs": [[-1, -1], [-1, -1]]}, rejects.LENGTHS_DIFFER),
    ("rollouts", {**IDS, "log_probs": [[-1, 0.5], [-1]]}, rejects.NOT_A_LOG_PROB),
    ("rollouts", {**IDS, "log_probs": [[-1, float("-inf")], [-1]]}, rejects.NOT_FINITE),
    ("rollouts", {**IDS, "log_probs": [-1, -1]}, rejects.WRONG_TYPE),
]


@pytest.mark.parametrize(("format", "row", "reason"), HOSTILE)
def test_bad_row_is_rejected_and_its_neighbours_are_not(marked_tokenizer, format, row, reason):
    good = {"preference": TEXT_PAIR, "labelled": LABELLED, "scored": SCORED, "stepwise": STEPS, "rollouts": ROLLOUTS}[
        format
    ]
    formatter = Formatter(marked_tokenizer, options=FormatOptions(max_tokens=64))
    before, outcome, after = formatter.encode([good, row, good], format=format)
    assert isinstance(outcome, RowRejectedError), outcome
    assert outcome.reason == reason
    assert segments(before) == segments(after)


@pytest.mark.parametrize("column", ["chosen", "rejected"])
def test_completion_without_an_answer_is_named_by_its_column(marked_tokenizer, column):
    outcome = encode(marked_tokenizer, {**CHAT_PAIR, column: [ASKED]}, format="preference")
    assert (outcome.reason, outcome.detail) == (rejects.NO_ASSISTANT, f"the roles of {column} are user")


def test_template_that_trims_to_equal_completions_is_rejected():
    row = {**CHAT_PAIR, "rejected": [{**FOUR, "content": "four "}]}
    outcome = encode(build_tokenizer(chat_template=STRICT), row, format="preference")
    assert outcome.reason == rejects.SAME_COMPLETIONS


def test_conversations_that_share_no_token_are_rejected():
    with pytest.raises(RowRejectedError, match=rejects.NO_PROMPT):
        join_completions(
            [np.array([1, 2]), np.array([3, 2])],
            [np.array([False, True])] * 2,
            scores=(0.0, 0.0),
            must_differ=True,
        )


@pytest.mark.parametrize(("option", "value"), [("loss_on", "all"), ("too_long", "split")])
@pytest.mark.parametrize("row", [TEXT_PAIR, LABELLED, SCORED, STEPS, ROLLOUTS], ids=list(TUNERS))
def test_options_without_a_meaning_are_refused_by_name(plain_tokenizer, row, option, value):
    with pytest.raises(OptionError, match=f"{option}='{value}'"):
        tokenize_sources([row], tokenizer=plain_tokenizer, options=FormatOptions(max_tokens=64, **{option: value}))


def test_text_without_a_tokenizer_is_an_error_and_ids_are_not():
    assert len(tokenize_sources([IDS], tokenizer=None, options=FormatOptions(max_tokens=8))) == 1
    with pytest.raises(DataError, match="tokenizer"):
        tokenize_sources([ROLLOUTS], tokenizer=None, options=FormatOptions(max_tokens=8))


def test_every_format_with_completions_has_a_tuner():
    assert list(TUNERS) == list(COLUMNS)[: len(TUNERS)]


def take(dataset, number=0):
    document = dataset[number]
    parts = np.split(document.input_ids, np.cumsum(document.segment_lengths)[:-1])
    return [part.tolist() for part in parts]


def tokenize_ids(*values, **options):
    return tokenize_sources(list(values), tokenizer=None, options=FormatOptions(**options), max_reject_share=0.5)


def test_long_example_is_counted_as_a_pack_holds_it():
    # Five tokens, and one copy of the prompt's last token: (2 - 1) + (2 + 1) + (1 + 1).
    assert take(tokenize_ids(IDS, max_tokens=6)) == [[1, 2], [3, 4], [5]]
    with pytest.raises(DataError, match=r"Raise max_tokens to 6, or use too_long='truncate' \(cuts completions"):
        tokenize_ids(IDS, max_tokens=5)


def test_truncation_gives_completions_equal_shares():
    row = {**IDS, "completion_ids": [[3, 4, 5, 6], [7]], "log_probs": [[-1, -2, -3, -4], [-5]]}
    dataset = tokenize_ids(row, max_tokens=7, too_long="truncate")
    assert take(dataset) == [[1, 2], [3, 4], [7]]
    assert dataset[0].log_probs.tolist() == [0, 0, -1, -2, -5]
    assert dataset[0].scores == (1.0, 0.5)
    assert (dataset.report.num_truncated, dataset.report.longest) == (1, 8)


@pytest.mark.parametrize("max_tokens", range(4, 12))
def test_truncated_example_fits_and_keeps_its_prompt(max_tokens):
    row = {"prompt_ids": [1, 2], "completion_ids": [[3] * 6, [4] * 2, [5] * 9], "rewards": [0, 0, 0]}
    if max_tokens < 7:
        with pytest.raises(DataError, match=rejects.PROMPT_TOO_LONG):
            tokenize_ids(row, max_tokens=max_tokens, too_long="truncate")
        return
    prompt, *completions = take(tokenize_ids(row, max_tokens=max_tokens, too_long="truncate"))
    assert prompt == [1, 2]
    assert len(prompt) - 1 + sum(len(completion) + 1 for completion in completions) <= max_tokens


def test_completion_that_loses_its_trained_tokens_is_rejected():
    is_trained = np.array([False, False, False, True, True])
    example = join_completions(
        [np.array([1, 2, 3, 4]), np.array([1, 5])],
        [np.array([False, False, False, True]), np.array([False, True])],
        scores=(0.0, 0.0),
        must_differ=True,
    )
    assert example[1].tolist() == is_trained.tolist()
    with pytest.raises(RowRejectedError, match=rejects.ALL_MASKED_TRUNCATED):
        cut_completions(*example, max_tokens=5, must_differ=True)


def test_pair_that_loses_its_difference_is_rejected(plain_tokenizer):
    rows = [{"prompt": "two", "chosen": " is" * 9 + end, "rejected": " is" * 9 + " two"} for end in (" four", "")]
    options = {"tokenizer": plain_tokenizer, "max_reject_share": 0.5}
    dataset = tokenize_sources(rows, options=FormatOptions(max_tokens=64, too_long="truncate"), **options)
    assert len(dataset) == 2
    with pytest.raises(DataError, match=rejects.SAME_COMPLETIONS_TRUNCATED):
        tokenize_sources(rows, options=FormatOptions(max_tokens=12, too_long="truncate"), **options)


def test_equal_beginnings_of_rollouts_are_kept():
    row = {"prompt_ids": [1, 2], "completion_ids": [[3, 4, 5], [3, 4, 6]], "rewards": [0, 1]}
    assert take(tokenize_ids(row, max_tokens=7, too_long="truncate")) == [[1, 2], [3, 4], [3, 4]]


@pytest.mark.parametrize("is_first", [True, False])
def test_sources_with_and_without_completions_are_no_data_set(tmp_path, plain_tokenizer, is_first):
    for name, row in (("a.jsonl", TEXT_PAIR if is_first else {"text": "two"}), ("b.jsonl", {"text": "two"})):
        (tmp_path / name).write_text(json.dumps(row))
    if not is_first:
        (tmp_path / "b.jsonl").write_text(json.dumps(TEXT_PAIR))
    with pytest.raises(DataError, match=r"a\.jsonl \(.*\) and .*b\.jsonl \(.*\) cannot be one data set"):
        tokenize_sources(tmp_path, tokenizer=plain_tokenizer, options=FormatOptions(max_tokens=64))


def test_sources_of_several_formats_with_completions_are_one_data_set(tmp_path, plain_tokenizer):
    (tmp_path / "a.jsonl").write_text(json.dumps(TEXT_PAIR))
    (tmp_path / "b.jsonl").write_text(json.dumps(ROLLOUTS))
    dataset = tokenize_sources(tmp_path, tokenizer=plain_tokenizer, options=FormatOptions(max_tokens=64))
    assert dataset.report.rows_per_format == {"preference": 1, "rollouts": 1}


@pytest.mark.slow
def test_pairs_of_gsm8k_share_the_tokens_of_their_questions():
    if not (SHARED / "gpt2_bpe" / "vocab.json").is_file():
        pytest.skip(f"needs the data sets of {SHARED.name}, which are not part of the project")
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    bpe = ByteLevelBPETokenizer(str(SHARED / "gpt2_bpe" / "vocab.json"), str(SHARED / "gpt2_bpe" / "merges.txt"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, eos_token="<|endoftext|>")
    lines = [json.loads(line) for line in (SHARED / "gsm8k" / "test.jsonl").read_text().splitlines()]
    values = [
        {"prompt": line["question"], "chosen": line["answer"], "rejected": other["answer"]}
        for line, other in itertools.pairwise(lines)
    ]
    dataset = tokenize_sources(
        values, tokenizer=tokenizer, options=FormatOptions(max_tokens=4096, separator="\n"), vocab_size=50257
    )
    assert (len(dataset), dataset.report.num_rejected) == (len(values), 0)
    for number in range(0, len(values), 20):
        prompt, chosen, rejected = take(dataset, number)
        row = values[number]
        assert tokenizer.decode(prompt) == row["prompt"] + "\n"
        for ids, column in ((chosen, "chosen"), (rejected, "rejected")):
            assert tokenizer.decode(ids) == row[column] + "<|endoftext|>"
            assert prompt + ids == tokenizer(f"{row['prompt']}\n{row[column]}<|endoftext|>")["input_ids"]
