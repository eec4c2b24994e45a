"""How models of families write calls of tools, and how functions are described to them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from transformers.utils import get_json_schema
from transformers.utils.chat_template_utils import DocstringParsingException, TypeHintParsingException

from lightning_fastft.core.errors import OptionError

_FUNCTION = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
_REASONING = {"open": "<think>", "close_pattern": r"</think>\s*", "content": "text"}


def _calls_in_tags(open_pattern: str, argument_pattern: str) -> dict[str, Any]:
    """Return a syntax whose arguments are in tags, as text; their types are those of the tool."""
    calls = {
        "open_pattern": open_pattern, "close_pattern": r"</tool_call>\s*", "repeats": True, "content": "xml-inline",
        "content_args": {"tag_pattern": argument_pattern, "value_parser": {"name": "text"}}, "transform": _FUNCTION,
    }  # fmt: skip
    return {"reasoning_content": _REASONING, "tool_calls": calls}


# How families write calls: fields of transformers' response templates.
_SYNTAXES: tuple[dict[str, Any], ...] = (
    # Qwen2.5, Qwen3, Hermes, SmolLM3.
    {
        "reasoning_content": _REASONING,
        "tool_calls": {
            "open": "<tool_call>", "close_pattern": r"</tool_call>\s*", "repeats": True, "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
    },
    # Qwen3-Coder, Qwen3.5.
    _calls_in_tags(
        r"<tool_call>\s*<function=(?P<name>[^\n>]+)>",
        r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>",
    ),
    # GLM-4.5 and later.
    _calls_in_tags(
        r"<tool_call>(?P<name>[^\s<]+)\s*",
        r"<arg_key>(?P<key>[^<]+)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>",
    ),
    # Llama 3.1 and later.
    {
        "tool_calls": {
            "open_pattern": r'\{"name":\s*"(?P<name>[^"]+)",\s*"parameters":\s*', "close_pattern": r"\}\s*(?=<\||$)",
            "content": "json", "repeats": True, "transform": _FUNCTION,
        },
    },
    # gpt-oss.
    {
        "reasoning_content": {
            "open": "<|channel|>analysis<|message|>", "close_pattern": r"<\|end\|>(<\|start\|>assistant)?",
            "content": "text",
        },
        "tool_calls": {
            "open_pattern": (
                r"\s*to=functions\.(?P<name>\S+?)<\|channel\|>commentary (json|<\|constrain\|>json)<\|message\|>"
            ),
            "close_pattern": r"<\|call\|>", "repeats": True, "content": "json", "transform": _FUNCTION,
        },
        "content": {"open": "<|channel|>final<|message|>"},
    },
)  # fmt: skip
# In no text, so that all of the prefix that is given belongs to the turn.
_NO_ANCHOR = "\0"
_THINKS = "<think>"


def describe_tool(tool: Callable[..., Any]) -> dict[str, Any]:
    """Return the JSON schema of a function, from its docstring and the types of its arguments.

    Raises:
        OptionError: One of them is missing.

    Source:
        transformers.utils.get_json_schema.
    """
    try:
        schema: dict[str, Any] = get_json_schema(tool)
    except (DocstringParsingException, TypeHintParsingException) as error:
        raise OptionError(
            f"A tool cannot be described to the model: {error} It needs a docstring with a line for each argument "
            "under 'Args:', and a type for each argument."
        ) from error
    return schema


def known_syntaxes(end_texts: Sequence[str]) -> list[dict[str, Any]]:
    """Return the syntaxes of calls that are known, as response templates of transformers.

    Args:
        end_texts: Texts of the tokens that end a turn.
    """
    ends = "|".join(map(re.escape, end_texts))
    content = {"close_pattern": rf"(?:{ends})\s*", "content": "text"}
    shared = {"start_anchor": _NO_ANCHOR, "defaults": {"role": "assistant"}}
    return [
        {**shared, "fields": {**fields, "content": {**content, **fields.get("content", {})}}} for fields in _SYNTAXES
    ]


def read_turn(
    tokenizer: Any, ids: Sequence[int], *, prompt: Sequence[int], syntax: dict[str, Any], tools: list[Any] | None
) -> dict[str, Any] | None:
    """Return a turn as a message of a chat; None if it is empty or malformed.

    Args:
        tokenizer: Decodes it.
        ids: Tokens of the turn.
        prompt: Tokens before it.
        syntax: A response template.
        tools: Descriptions of the tools, for the types of arguments.

    Source:
        PreTrainedTokenizerBase.parse_response of transformers.
    """
    if not ids:
        return None
    prefix: str | list[int] = list(prompt)
    if syntax.get("start_anchor") == _NO_ANCHOR:
        # The prompt of a turn may begin its reasoning.
        prefix = _THINKS if tokenizer.decode(list(prompt)[-8:]).rstrip().endswith(_THINKS) else ""
    try:
        found = tokenizer.parse_response(list(ids), syntax, prefix=prefix, tools=tools)
        calls = (found or {}).get("tool_calls") or []
        is_whole = all(isinstance(call["function"]["name"], str) and "arguments" in call["function"] for call in calls)
    except (ValueError, TypeError, KeyError):
        return None
    return found if is_whole else None
