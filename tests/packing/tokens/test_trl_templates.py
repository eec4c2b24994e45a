"""Templates of real model families: the trained text is that which TRL's marked copies of them train."""

import re
from pathlib import Path

import pytest

from lightning_fastft.packing.rows.formats import FormatOptions
from lightning_fastft.packing.rows.rejects import RowRejectedError
from lightning_fastft.packing.tokens.formatter import Formatter
from tests.packing.conftest import build_tokenizer

CONTROL = re.compile(r"<\|[A-Za-z0-9_/]+\|>|<\uff5c[^\uff5c]+\uff5c>|<(?:start|end)_of_turn>|</?think>|</?tool_call>")
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
    folder = Path(pytest.importorskip("trl").__file__).parent / "chat_templates"
    template, marked = ((folder / f"{family}{end}.jinja").read_text() for end in ("", "_training"))
    tokenizer = build_tokenizer(chat_template=template, bos_token="<s>")
    tokenizer.add_tokens(sorted(set(CONTROL.findall(template))), special_tokens=True)
    row = {"messages": messages} if tools is None else {"messages": messages, "tools": tools}
    (example,) = Formatter(tokenizer, options=FormatOptions(max_tokens=4096)).encode([row], format="messages")
    assert not isinstance(example, RowRejectedError), example.detail
    whole = tokenizer.apply_chat_template(
        messages, tools=tools, chat_template=marked, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    ours = stretches(tokenizer, example.input_ids.tolist(), example.is_trained.tolist())
    theirs = stretches(tokenizer, whole["input_ids"], whole["assistant_masks"])
    if family == "qwen3":  # TRL adds an empty thought to each turn, Qwen3 to the last one.
        theirs = [text if text is theirs[-1] else text.replace("<think>\n\n</think>\n\n", "") for text in theirs]
    assert ours == [SPEAKER.sub("", text).removesuffix("\n") for text in theirs]


def stretches(tokenizer, ids, is_trained):
    """The texts of the stretches that are trained."""
    texts, last = [], False
    for token, trained in zip(ids, is_trained):
        if trained:
            texts = texts if last else [*texts, []]
            texts[-1].append(token)
        last = trained
    return [tokenizer.decode(tokens) for tokens in texts]
