"""Check the messages of a row, and bring them to one form."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_fastft.packing.rows.parsing import check_text, parse_json
from lightning_fastft.packing.rows.rejects import (
    EMPTY_MESSAGES,
    NO_ASSISTANT,
    UNKNOWN_ROLE,
    WRONG_TYPE,
    RowRejectedError,
)

# A turn with one of these keys at 0 or false is not trained: OpenAI's name, and those of other trainers.
TRAINED_FLAGS = ("weight", "train", "training", "loss")
# Keys of the reasoning that comes before an answer: a template reads one of them.
REASONING = ("reasoning_content", "thinking", "reasoning")
# Types of message parts that are images.
IMAGE_PARTS = frozenset({"image", "image_url"})
KNOWN_ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
# Speakers of the ShareGPT format, mapped to the roles of a chat template.
SPEAKERS = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "assistant"), "assistant"),
    "system": "system",
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
}


def check_messages(value: object, *, column: str = "messages", needs_assistant: bool = True) -> list[dict[str, Any]]:
    """Return the messages of a conversation, without null keys and with content as one string, or as a list of parts
    if one of them is an image.

    A ``function_call`` becomes a tool call. An untrained message has ``weight`` 0. A message of another role than the
    assistant's has ``weight`` 1 if a flag asks to train it; other messages have no weight.

    Raises:
        RowRejectedError: The value is not a list of messages with known roles and text.
    """
    if not isinstance(value, (list, tuple)):
        advice = "; it is JSON in a text: save it as a list, not as text" if str(value).lstrip()[:1] == "[" else ""
        raise RowRejectedError(WRONG_TYPE, f"{column} must be a list of messages, got {type(value).__name__}{advice}")
    if not value:
        raise RowRejectedError(EMPTY_MESSAGES, column)
    messages = [_check_message(message, where=f"{column}[{number}]") for number, message in enumerate(value)]
    if needs_assistant and not any(message["role"] == "assistant" for message in messages):
        roles = ", ".join(message["role"] for message in messages[:8])
        raise RowRejectedError(NO_ASSISTANT, f"the roles of {column} are {roles}")
    return messages


def read_conversation(value: object, *, system: object = None) -> list[dict[str, Any]]:
    """Return a ShareGPT conversation, ``{"from": "human", "value": "..."}``, as messages.

    Turns with ``role`` and ``content`` are messages already. The value of the row's system column, if any, becomes the
    first message.

    Raises:
        RowRejectedError: The value is not a list of turns with known speakers and text.

    Example:
        >>> read_conversation([{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "4"}])
        [{'role': 'user', 'content': '2 + 2?'}, {'role': 'assistant', 'content': '4'}]
    """
    turns = (
        [_read_turn(turn, where=f"conversations[{number}]") for number, turn in enumerate(value)]
        if isinstance(value, (list, tuple))
        else value
    )
    messages = check_messages(turns, column="conversations")
    if system is None or system == "":
        return messages
    if messages[0]["role"] == "system":
        raise RowRejectedError(WRONG_TYPE, "the row has a system column and conversations has a system turn too")
    return [{"role": "system", "content": check_text(system, column="system", may_be_empty=True)}, *messages]


def check_tools(tools: object) -> list[Any] | None:
    """Return the descriptions of tools, a list or its JSON text; None if there are none.

    Raises:
        RowRejectedError: The value is not a list of JSON values.
    """
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except ValueError as error:
            raise RowRejectedError(WRONG_TYPE, f"tools is a string that is not valid JSON: {error}") from None
    if tools is not None and not isinstance(tools, (list, tuple)):
        raise RowRejectedError(WRONG_TYPE, f"tools must be a list, got {type(tools).__name__}")
    if not tools:
        return None
    _check_json(tools, where="tools")
    return list(tools)


def _read_turn(turn: object, *, where: str) -> object:
    """Return a ShareGPT turn as a message; return any other value unchanged, for check_messages to reject."""
    if not isinstance(turn, Mapping) or turn.get("role") is not None or "from" not in turn:
        return turn
    speaker = turn["from"]
    if not isinstance(speaker, str) or speaker not in SPEAKERS:
        raise RowRejectedError(UNKNOWN_ROLE, f"{speaker!r} in {where}; allowed: {', '.join(sorted(SPEAKERS))}")
    return {"role": SPEAKERS[speaker], "content": turn.get("value")} | {
        name: turn[name] for name in TRAINED_FLAGS if name in turn
    }


def _check_message(value: object, *, where: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise RowRejectedError(
            WRONG_TYPE, f"{where} must be an object with role and content, got {type(value).__name__}"
        )
    message = {key: entry for key, entry in value.items() if entry is not None}
    role = message.get("role")
    if not isinstance(role, str):
        keys = f"; its keys are {', '.join(map(str, value))}" if "role" not in value else ""
        raise RowRejectedError(WRONG_TYPE, f"{where}.role must be a string, got {role!r}{keys}")
    if role not in KNOWN_ROLES:
        raise RowRejectedError(UNKNOWN_ROLE, f"{role!r} in {where}; allowed: {', '.join(sorted(KNOWN_ROLES))}")
    _take_function_call(message, where=where)
    content = message.get("content")
    calls_a_tool = role == "assistant" and bool(message.get("tool_calls"))
    may_be_empty = calls_a_tool or role not in ("user", "assistant")
    if isinstance(content, (list, tuple)) and any(
        isinstance(part, Mapping) and part.get("type") in IMAGE_PARTS for part in content
    ):
        message["content"] = _check_parts(content, where=where)
    elif content is not None:
        # Every template takes strings; only templates for images take parts.
        text = _join_parts(content, where=where) if isinstance(content, (list, tuple)) else content
        message["content"] = check_text(text, column=f"{where}.content", may_be_empty=may_be_empty)
    elif not calls_a_tool:
        raise RowRejectedError(WRONG_TYPE, f"{where} has no content")
    _check_reasoning(message, where=where)
    _check_calls(message, where=f"{where}.tool_calls")
    _take_weight(message, where=where)
    return message


def _join_parts(parts: Sequence[object], *, where: str) -> str:
    """Return the text of the parts of a message, which are all text."""
    texts = [
        part.get("text") if isinstance(part, Mapping) and part.get("type", "text") == "text" else None for part in parts
    ]
    if not all(isinstance(text, str) for text in texts):
        kinds = {str(part.get("type")) if isinstance(part, Mapping) else type(part).__name__ for part in parts}
        others = ", ".join(sorted(kinds - {"text"}))
        raise RowRejectedError(WRONG_TYPE, f"{where} has a part that is not text: {others}")
    return "".join(map(str, texts))


def _check_reasoning(message: dict[str, Any], *, where: str) -> None:
    """Check that reasoning is text, and drop an empty one."""
    for name in REASONING:
        if name in message and not check_text(message[name], column=f"{where}.{name}", may_be_empty=True).strip():
            del message[name]


def _take_function_call(message: dict[str, Any], *, where: str) -> None:
    """Replace ``function_call``, OpenAI's earlier form, by a tool call."""
    call = message.pop("function_call", None)
    if not call:
        return
    if message.get("tool_calls"):
        raise RowRejectedError(WRONG_TYPE, f"{where} has both tool_calls and function_call; keep one of them")
    message["tool_calls"] = [{"type": "function", "function": call}]


def _check_calls(message: dict[str, Any], *, where: str) -> None:
    """Check that tool calls are objects whose arguments are an object or its JSON text."""
    if not message.get("tool_calls"):
        message.pop("tool_calls", None)
        return
    calls = message["tool_calls"]
    if not isinstance(calls, (list, tuple)):
        raise RowRejectedError(WRONG_TYPE, f"{where} must be a list, got {type(calls).__name__}")
    for number, call in enumerate(calls):
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            raise RowRejectedError(WRONG_TYPE, f"{where}[{number}] must be an object with name and arguments")
        arguments = function.get("arguments", {})
        try:
            value = parse_json(arguments.encode("utf-8", "surrogatepass")) if isinstance(arguments, str) else arguments
        except RowRejectedError as error:
            raise RowRejectedError(error.reason, f"{where}[{number}]: its arguments: {error.detail}") from None
        if not isinstance(value, Mapping):
            raise RowRejectedError(
                WRONG_TYPE, f"{where}[{number}]: its arguments must be a JSON object, got {type(value).__name__}"
            )
        if value is arguments:
            _check_json(value, where=f"{where}[{number}]: its arguments")


def _check_json(value: object, *, where: str) -> None:
    """Refuse dates and bytes of tables, in whose place a template would write the name of their type."""
    try:
        json.dumps(value)
    except (TypeError, ValueError) as error:
        raise RowRejectedError(WRONG_TYPE, f"{where} must be JSON values or their JSON text: {error}") from None


def _check_parts(content: Sequence[Any], *, where: str) -> list[dict[str, Any]]:
    """Return the parts of a content with images, without null keys."""
    parts = []
    for number, part in enumerate(content):
        kind = part.get("type", "text") if isinstance(part, Mapping) else type(part).__name__
        if kind not in ("text", *IMAGE_PARTS):
            raise RowRejectedError(WRONG_TYPE, f"{where} has a part that is neither text nor image: {kind}")
        if kind == "text":
            text = check_text(part.get("text"), column=f"{where}.content[{number}].text", may_be_empty=True)
            parts.append({"type": "text", "text": text})
        else:
            parts.append({**{name: entry for name, entry in part.items() if entry is not None}, "type": kind})
    return parts


def _take_weight(message: dict[str, Any], *, where: str) -> None:
    """Replace the trained flags of a message by ``weight``, as ``check_messages`` describes it."""
    flags = [(name, message.pop(name)) for name in TRAINED_FLAGS if name in message]
    for name, flag in flags:
        if flag not in (0, 1):
            raise RowRejectedError(WRONG_TYPE, f"{where}.{name} must be 0 or 1, got {flag!r}")
    if not all(flag for _, flag in flags):
        message["weight"] = 0
    elif flags and message["role"] != "assistant":
        message["weight"] = 1
