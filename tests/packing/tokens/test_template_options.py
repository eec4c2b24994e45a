"""chat_template_kwargs, of rows and for all rows: the options reach the template, as in transformers and TRL."""

import inspect
import json
import re
from itertools import groupby

import pytest
from transformers import PreTrainedTokenizerBase

from lightning_fastft.core.errors import OptionError
from lightning_fastft.packing.rows.formats import FormatOptions
from lightning_fastft.packing.rows.rejects import RowRejectedError
from lightning_fastft.packing.store.cache import tokenize_sources
from lightning_fastft.packing.tokens.formatter import Formatter
from tests.packing.conftest import MARKED, UNMARKED, build_tokenizer
from tests.packing.tokens.test_trl_templates import CONTROL, read_template

ASKED, ANSWERED = {"role": "user", "content": "two plus"}, {"role": "assistant", "content": "four"}
OTHER = {"role": "assistant", "content": "the answer is four"}
OFF, ON = {"enable_thinking": False}, {"enable_thinking": True}
GREETING = "{% if mood is defined %}{{ mood }}: {% endif %}"


def build(template):
    tokenizer = build_tokenizer(chat_template=template)
    tokenizer.add_tokens(sorted(set(CONTROL.findall(template))), special_tokens=True)
    return tokenizer


def encode(tokenizer, row, *, format="messages", **options):
    (example,) = Formatter(tokenizer, options=FormatOptions(max_tokens=4096, **options)).encode([row], format=format)
    return example


def trained(tokenizer, example):
    flags = zip(example.input_ids.tolist(), example.is_trained.tolist())
    return [tokenizer.decode([token for token, _ in run]) for is_on, run in groupby(flags, lambda f: f[1]) if is_on]


@pytest.mark.parametrize("loss_on", ["completion", "all"])
@pytest.mark.parametrize(
    ("family", "options"),
    [
        *((family, options) for family in ("qwen3", "qwen3_5_think", "glm4moe") for options in (OFF, ON, {})),
        ("gptoss", {"reasoning_effort": "high", "model_identity": "You are two."}),
        ("gptoss", {}),
        ("qwen3_training", OFF),
    ],
)
def test_row_has_the_tokens_that_transformers_gives_with_its_options(family, options, loss_on):
    tokenizer = build(read_template(family))
    row = {"messages": [ASKED, ANSWERED], "chat_template_kwargs": options}
    example = encode(tokenizer, row, loss_on=loss_on, add_eos=False)
    assert not isinstance(example, RowRejectedError), example.detail
    whole = tokenizer.apply_chat_template([ASKED, ANSWERED], tokenize=True, return_dict=True, **options)["input_ids"]
    assert example.input_ids.tolist() == whole
    if loss_on == "completion" and "training" not in family:
        asked = tokenizer.apply_chat_template(
            [ASKED], tokenize=True, return_dict=True, add_generation_prompt=True, **options
        )["input_ids"]
        if whole[: len(asked)] == asked:
            assert not example.is_trained[: len(asked)].any()
            assert example.is_trained[len(asked)]


def test_empty_thought_of_a_generation_prompt_is_not_trained():
    tokenizer = build(read_template("qwen3"))
    found = [
        trained(tokenizer, encode(tokenizer, {"messages": [ASKED, ANSWERED], "chat_template_kwargs": options}))
        for options in (OFF, ON, None)
    ]
    thought = "<think>\n\n</think>\n\nfour<|im_end|>"
    assert found == [["four<|im_end|>"], [thought], [thought]]


@pytest.mark.parametrize("template", [GREETING + MARKED, GREETING + UNMARKED], ids=["marked", "unmarked"])
@pytest.mark.parametrize(
    ("format", "row"),
    [
        ("messages", {"messages": [ASKED, ANSWERED]}),
        (
            "conversations",
            {"conversations": [{"from": "human", "value": "two plus"}, {"from": "gpt", "value": "four"}]},
        ),
        ("prompt_completion", {"prompt": [ASKED], "completion": [ANSWERED]}),
        ("labelled", {"prompt": [ASKED], "completion": [ANSWERED], "label": True}),
        ("scored", {"prompt": [ASKED], "completion": [ANSWERED], "score": 1.0}),
        ("rollouts", {"prompt": [ASKED], "completions": [[ANSWERED]], "rewards": [1.0]}),
    ],
)
def test_options_reach_the_template_in_every_format_of_messages(template, format, row):
    tokenizer = build_tokenizer(chat_template=template)
    for mood in ({"mood": "glad"}, {"mood": "sad"}, {}):
        example = encode(tokenizer, {**row, "chat_template_kwargs": mood}, format=format, add_eos=False)
        whole = tokenizer.apply_chat_template([ASKED, ANSWERED], tokenize=True, return_dict=True, **mood)["input_ids"]
        assert example.input_ids.tolist() == whole
        assert trained(tokenizer, example) == ["four<|im_end|>"]


def test_both_completions_of_a_preference_and_the_prompt_of_a_rollout_have_the_options_of_the_row():
    tokenizer = build(read_template("qwen3"))
    row = {"prompt": [ASKED], "chosen": [ANSWERED], "rejected": [OTHER], "chat_template_kwargs": OFF}
    example = encode(tokenizer, row, format="preference")
    asked = tokenizer.apply_chat_template([ASKED], tokenize=True, return_dict=True, add_generation_prompt=True, **OFF)
    num_prompt = example.completions.segment_lengths[0]
    formatter = Formatter(tokenizer, options=FormatOptions(max_tokens=512))
    assert formatter.encode_prompt([ASKED], template_options=OFF) == asked["input_ids"]
    assert asked["input_ids"] != formatter.encode_prompt([ASKED])
    assert example.input_ids[: len(asked["input_ids"])].tolist() == asked["input_ids"]
    assert num_prompt == len(asked["input_ids"])
    # Without the option the empty thought is what both answers begin with, and is trained.
    plain = encode(tokenizer, {**row, "chat_template_kwargs": None}, format="preference")
    assert plain.completions.segment_lengths[0] < num_prompt


def test_rows_of_one_data_set_have_options_of_their_own(tmp_path):
    tokenizer = build_tokenizer(chat_template=GREETING + UNMARKED)
    moods = [{"mood": f"m{number % 70}"} if number % 3 else None for number in range(150)]
    rows = [{"messages": [ASKED, ANSWERED], "chat_template_kwargs": mood} for mood in moods]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for source in (rows, path):
        dataset = tokenize_sources(source, tokenizer=tokenizer, options=FormatOptions(max_tokens=512, add_eos=False))
        assert dataset.report.unread_columns == []
        for number, mood in enumerate(moods):
            whole = tokenizer.apply_chat_template([ASKED, ANSWERED], return_dict=True, **(mood or {}))["input_ids"]
            assert dataset[number].input_ids.tolist() == whole


def test_null_options_are_not_given_and_text_is_read_as_json():
    tokenizer = build_tokenizer(chat_template=GREETING + UNMARKED)
    bare, glad = (
        encode(tokenizer, {"messages": [ASKED, ANSWERED], "chat_template_kwargs": mood}).input_ids.tolist()
        for mood in (None, {"mood": "glad"})
    )
    assert bare != glad
    for value, expected in (({"mood": None}, bare), ("null", bare), ('{"mood": "glad"}', glad)):
        row = {"messages": [ASKED, ANSWERED], "chat_template_kwargs": value}
        assert encode(tokenizer, row).input_ids.tolist() == expected


@pytest.mark.parametrize(
    ("value", "detail"),
    [
        ([1], "must be an object, got list"),
        ("{", "not valid JSON"),
        ({"tokenize": False}, "'tokenize'.*all rows"),
        ({"add_generation_prompt": True}, "'add_generation_prompt'"),
        ({"mood": {1, 2}}, "JSON"),
    ],
)
def test_wrong_options_reject_the_row(value, detail):
    tokenizer = build_tokenizer(chat_template=MARKED)
    found = encode(tokenizer, {"messages": [ASKED, ANSWERED], "chat_template_kwargs": value})
    assert isinstance(found, RowRejectedError)
    assert re.search(detail, found.detail)


@pytest.mark.parametrize(
    ("format", "row"),
    [
        ("prompt_completion", {"prompt": "two", "completion": "four"}),
        ("preference", {"prompt": "two", "chosen": "four", "rejected": "five"}),
    ],
)
def test_options_of_a_text_prompt_are_refused_and_empty_ones_are_not(format, row):
    tokenizer = build_tokenizer(chat_template=MARKED)
    assert "list of messages" in encode(tokenizer, {**row, "chat_template_kwargs": OFF}, format=format).detail
    for empty in ({}, {"mood": None}):
        assert len(encode(tokenizer, {**row, "chat_template_kwargs": empty}, format=format).input_ids)


def test_every_argument_of_transformers_but_documents_is_refused():
    names = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters
    for name in set(names) - {"self", "kwargs", "documents"}:
        found = encode(
            build_tokenizer(chat_template=MARKED),
            {"messages": [ASKED, ANSWERED], "chat_template_kwargs": {name: True}},
        )
        assert isinstance(found, RowRejectedError), name


@pytest.mark.parametrize("loss_on", ["completion", "all"])
def test_options_for_all_rows_reach_the_template_and_those_of_a_row_come_first(loss_on):
    template = GREETING + "{% if place is defined %}{{ place }} {% endif %}" + MARKED
    tokenizer = build_tokenizer(chat_template=template)
    given = {"mood": "glad", "place": None}
    for own, expected in (
        (None, {"mood": "glad"}),
        ({"mood": None}, {"mood": "glad"}),
        ({"mood": "sad"}, {"mood": "sad"}),
        ({"place": "here"}, {"mood": "glad", "place": "here"}),
    ):
        row = {"messages": [ASKED, ANSWERED], "chat_template_kwargs": own}
        example = encode(tokenizer, row, loss_on=loss_on, add_eos=False, chat_template_kwargs=given)
        whole = tokenizer.apply_chat_template([ASKED, ANSWERED], return_dict=True, **expected)["input_ids"]
        assert example.input_ids.tolist() == whole
    formatter = Formatter(tokenizer, options=FormatOptions(max_tokens=512, chat_template_kwargs=given))
    asked = tokenizer.apply_chat_template([ASKED], return_dict=True, add_generation_prompt=True, mood="glad")
    assert formatter.encode_prompt([ASKED]) == asked["input_ids"]
    # Text rows have no template, and are not refused.
    text = encode(tokenizer, {"text": "two plus"}, format="text", chat_template_kwargs=given)
    assert text.input_ids.tolist() == encode(tokenizer, {"text": "two plus"}, format="text").input_ids.tolist()


def test_the_thought_that_an_option_for_all_rows_writes_is_not_trained():
    tokenizer = build(read_template("qwen3"))
    example = encode(tokenizer, {"messages": [ASKED, ANSWERED]}, chat_template_kwargs=OFF)
    assert trained(tokenizer, example) == ["four<|im_end|>"]


@pytest.mark.parametrize(
    ("value", "word"), [([1], "got list"), ({"tokenize": False}, "'tokenize'"), ({"mood": {1, 2}}, "JSON")]
)
def test_wrong_options_for_all_rows_are_refused(value, word):
    with pytest.raises(OptionError, match=f"chat_template_kwargs.*{word}"):
        FormatOptions(max_tokens=8, chat_template_kwargs=value)


def test_options_without_effect_are_refused():
    options = FormatOptions(max_tokens=8, chat_template_kwargs={"moods": "glad"})
    with pytest.raises(OptionError, match="Did you mean 'mood'"):
        Formatter(build_tokenizer(chat_template=GREETING + MARKED), options=options)
    with pytest.raises(OptionError, match="no chat template"):
        Formatter(build_tokenizer(), options=options)


def test_cached_tokens_depend_on_the_options_for_all_rows(tmp_path):
    tokenizer = build_tokenizer(chat_template=GREETING + UNMARKED)

    def read(given):
        options = FormatOptions(max_tokens=512, chat_template_kwargs=given)
        rows = [{"messages": [ASKED, ANSWERED]}]
        found = tokenize_sources(rows, tokenizer=tokenizer, options=options, cache_dir=tmp_path)
        return found[0].input_ids.tolist(), len(list(tmp_path.iterdir()))

    bare, _ = read(None)
    assert read({}) == (bare, 1)
    glad, num_entries = read({"mood": "glad"})
    assert (glad != bare, num_entries) == (True, 2)
    assert read({"mood": "glad"}) == (glad, 2)
