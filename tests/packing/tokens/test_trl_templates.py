"""Templates of real model families: the trained text is that which TRL's marked copies of them train."""

import re
from pathlib import Path

import pytest

from lightning_fastft.packing.rows.formats import FormatOptions
from lightning_fastft.packing.rows.rejects import RowRejectedError
from lightning_fastft.packing.tokens.formatter import Formatter
from tests.packing.conftest import build_tokenizer

CONTROL = re.compile(
    r"<\|[A-Za-z0-9_/]+\|>|<\uff5c[^\uff5c]+\uff5c>|<(?:start|end)_of_turn>|</?think>|</?tool_call>|<\|[a-z_]+>|<[a-z_]+\|>"
)
# What TRL trains in addition to the answer: the speaker, and the line break behind a turn.
SPEAKER = re.compile(r"^(?:<\uff5cAssistant\uff5c>|<\uff5ctool▁outputs▁end\uff5c>|<\|start\|>assistant|\n)")
FAMILIES = ["llama3", "gemma", "gemma3", "phi3", "phi3_5", "cohere", "cohere2"]
WITH_TOOLS = ["qwen2_5", "qwen3", "qwen3_instruct_2507", "deepseekv3", "gptoss"]
CHAT = [
    {"role": "user", "content": "two plus"},
    {"role": "assistant", "content": "four"},
    {"role": "user", "content": "four"},
    {"role": "assistant", "content": "four"},
]
CALL = {"type": "function", "id": "call00001", "function": {"name": "add", "arguments": {"a": 2}}}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer", "description": "A."}}},
        },
    }
]
CALLING = [
    CHAT[0],
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "name": "add", "tool_call_id": "call00001", "content": "four"},
    CHAT[1],
]


@pytest.mark.parametrize(
    ("family", "messages", "tools"),
    [
        *((family, CHAT, None) for family in [*FAMILIES, *WITH_TOOLS]),
        *((family, CALLING, TOOLS) for family in WITH_TOOLS),
    ],
)
def test_trained_text_is_that_of_marked_copies(family, messages, tools):
    marked = read_template(f"{family}_training")
    tokenizer, example = encode(family, messages, tools)
    assert not isinstance(example, RowRejectedError), example.detail
    whole = tokenizer.apply_chat_template(
        messages, tools=tools, chat_template=marked, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    ours = stretches(tokenizer, example.input_ids.tolist(), example.is_trained.tolist())
    theirs = stretches(tokenizer, whole["input_ids"], whole["assistant_masks"])
    if family == "qwen3":  # TRL adds an empty thought to each turn, Qwen3 to the last one.
        theirs = [text if text is theirs[-1] else text.replace("<think>\n\n</think>\n\n", "") for text in theirs]
    assert ours == [SPEAKER.sub("", text).removesuffix("\n") for text in theirs]


def with_calls(content, *, num_turns=1, **keys):
    """A conversation with some turns that call a tool, one behind the other, each followed by its result."""
    call = {"role": "assistant", "content": content, "tool_calls": [CALL], **keys}
    return [CHAT[0], *[call, CALLING[2]] * num_turns, CHAT[1]]


@pytest.mark.parametrize(
    ("family", "messages", "message"),
    [
        # <|tool_call>...<tool_call|><|tool_response>...<tool_response|>two plus<turn|>
        ("gemma4", with_calls("two plus"), "turn 1: .*text behind the results.*reasoning_content"),
        ("gemma4_v5", with_calls("two plus"), "turn 1: .*text behind the results.*reasoning_content"),
        # The second turn has no <|Assistant|>, no <|tool calls begin|>, and nothing of its content.
        ("deepseekv3", with_calls("", num_turns=2), "turn 3: .*otherwise than those of turn 1.*chat_template"),
    ],
)
def test_turns_that_a_template_writes_as_no_model_says_them_are_rejected_with_advice(family, messages, message):
    assert re.search(message, encode(family, messages, TOOLS)[1].detail)


@pytest.mark.parametrize("family", ["gemma4", "gemma4_v5"])
def test_thoughts_before_calls_and_calls_in_a_row_are_trained_by_templates_that_move_texts(family):
    tokenizer, example = encode(family, with_calls("", num_turns=2, reasoning_content="two"), TOOLS)
    call = "<|channel>thought\ntwo\n<channel|><|tool_call>call:add{a:2}<tool_call|><|tool_response>"
    found = stretches(tokenizer, example.input_ids.tolist(), example.is_trained.tolist())
    assert found == [call, call, "four<turn|>"]


def read_template(name):
    return (Path(pytest.importorskip("trl").__file__).parent / "chat_templates" / f"{name}.jinja").read_text()


def encode(family, messages, tools=None):
    """A tokenizer with the control tokens of a template, and its example, or why there is none."""
    template = read_template(family)
    tokenizer = build_tokenizer(chat_template=template, bos_token="<s>")
    tokenizer.add_tokens(sorted(set(CONTROL.findall(template))), special_tokens=True)
    row = {"messages": messages} if tools is None else {"messages": messages, "tools": tools}
    (example,) = Formatter(tokenizer, options=FormatOptions(max_tokens=4096)).encode([row], format="messages")
    return tokenizer, example


def stretches(tokenizer, ids, is_trained):
    """The texts of the stretches that are trained."""
    texts, last = [], False
    for token, trained in zip(ids, is_trained):
        if trained:
            texts = texts if last else [*texts, []]
            texts[-1].append(token)
        last = trained
    return [tokenizer.decode(tokens) for tokens in texts]
