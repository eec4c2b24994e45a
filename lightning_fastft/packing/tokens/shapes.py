"""Bring messages to the shape that a chat template reads: content, tool calls and reasoning.

Templates differ in what they take, and many drop the rest without a word. So a template is tried once with each shape
on a conversation of known words.
"""

from __future__ import annotations

import functools
import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from lightning_fastft.packing.rows.messages import REASONING
from lightning_fastft.packing.rows.rejects import TEMPLATE_DROPS, RowRejectedError

# Roles of the result of a tool.
RESULT_ROLES = ("tool", "function")
# Words that no template filter changes.
_QUESTION, _ANSWER, _ARGUMENT, _THOUGHT, _RESULT = "40917263", "58126934", "73920514", "26481957", "91736402"
_ARGUMENTS = {"city": _ARGUMENT}
_TOOL = {
    "name": "probe",
    "description": "A probe.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "description": "A city."}},
        "required": ["city"],
    },
}
_TOOLS = [{"type": "function", "function": _TOOL}]
_CALL = {"type": "function", "id": "call00001", "function": {"name": _TOOL["name"], "arguments": _ARGUMENTS}}
# How Python, and not JSON, writes the arguments, and how JSON writes a JSON text.
_WRONG_ARGUMENTS = re.compile(rf"'{_ARGUMENT}'|\\\"{_ARGUMENT}\\\"")

REASONING_DROPPED = "rows with reasoning that the chat template drops from at least one turn"
RESULTS_DROPPED = "rows with results of tools that the chat template drops"
TOOLS_DROPPED = "rows with tools that the chat template drops"
WORDS_DROPPED = "rows with texts beside tool calls that the chat template drops"
SYSTEM_DROPPED = "rows with a system message that the chat template drops"


class MessageShapes:
    """Bring messages to the shape that a chat template reads.

    Args:
        apply: Renders messages and tools with the template; raises RowRejectedError if the template refuses them.
    """

    def __init__(self, apply: Callable[[Sequence[dict[str, Any]], list[Any] | None], str]) -> None:
        self._apply = apply

    def shape(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return messages as the template reads them.

        Weights are removed. The role function, OpenAI's earlier name, becomes tool if the template shows only that.
        Content is a text, or parts if the template drops texts. Arguments of tool calls are
        objects, or JSON text if the template takes no objects. Reasoning has the name that the template reads.

        Raises:
            RowRejectedError: The template drops the content or the tool calls of the assistant.
        """
        answers = [message for message in messages if message["role"] == "assistant"]
        if any(answer.get("content") for answer in answers) and self._drops_answers:
            raise RowRejectedError(TEMPLATE_DROPS, "the content of assistant turns")
        if any(answer.get("tool_calls") for answer in answers) and self._argument_form == "dropped":
            raise RowRejectedError(TEMPLATE_DROPS, "tool calls; give chat_template")
        return [self._shape(message) for message in messages]

    def _shape(self, message: dict[str, Any]) -> dict[str, Any]:
        turn = {self._rename(name): value for name, value in message.items() if name != "weight"}
        if turn["role"] == "function" and self._shown_results == {"tool"}:
            turn["role"] = "tool"
        if turn.get("tool_calls"):
            # Many templates join the content, and raise if there is none.
            turn.setdefault("content", "")
            convert = _to_text if self._argument_form == "text" else _to_object
            turn["tool_calls"] = [_map_arguments(call, convert) for call in turn["tool_calls"]]
        if self._needs_parts and isinstance(turn.get("content"), str):
            turn["content"] = as_parts(turn["content"])
        return turn

    def _rename(self, name: str) -> str:
        """Return the key under which the template reads the reasoning of a message; other keys unchanged.

        Newer versions of transformers give templates all names; the tokens must not depend on the version.
        """
        is_read = name not in REASONING or name in self._read_names or not self._read_names
        return name if is_read else self._read_names[0]

    @functools.cached_property
    def _kept(self) -> tuple[set[str] | None, set[str] | None]:
        """Words that the template keeps of texts, and of parts; None if it raises."""
        return self._find_kept(lambda text: text), self._find_kept(as_parts)

    def _find_kept(self, shape: Callable[[str], Any]) -> set[str] | None:
        text = self._try([{"role": "user", "content": shape(_QUESTION)}, _answer(content=shape(_ANSWER))])
        return None if text is None else {word for word in (_QUESTION, _ANSWER) if word in text}

    @property
    def _needs_parts(self) -> bool:
        as_text, in_parts = self._kept
        return as_text != {_QUESTION, _ANSWER} and in_parts == {_QUESTION, _ANSWER}

    @property
    def _drops_answers(self) -> bool:
        # If the template raises on the words, its error is reported with the first row.
        as_text, in_parts = self._kept
        return as_text is not None and _ANSWER not in as_text and _ANSWER not in (in_parts or ())

    @functools.cached_property
    def _argument_form(self) -> str:
        """How the template takes the arguments of tool calls: "object", "text" or "dropped"."""
        forms = {"object": _CALL, "text": _map_arguments(_CALL, _to_text)}
        texts = {
            form: self._probe(_answer(content="", tool_calls=[given]), tools=_TOOLS) for form, given in forms.items()
        }
        for form, text in texts.items():
            if text is not None and _ARGUMENT in text and not _WRONG_ARGUMENTS.search(text):
                return form
        # The error of a template that raises on both is reported with the first row.
        return "dropped" if any(texts.values()) else "object"

    @functools.cached_property
    def _read_names(self) -> tuple[str, ...]:
        """Names of REASONING that the template reads."""
        return tuple(
            name
            for name in REASONING
            if _THOUGHT in (self._probe(_answer(content=_ANSWER, **{name: _THOUGHT}), tools=None) or "")
        )

    @functools.cached_property
    def _shown_results(self) -> frozenset[str]:
        """Roles under which the template shows the result of a tool."""
        calling, answer = self._shape(_answer(content="", tool_calls=[_CALL])), self._shape(_answer(content=_ANSWER))
        question = self._shape({"role": "user", "content": _QUESTION})
        result = self._shape({"role": "tool", "name": "probe", "tool_call_id": "call00001", "content": _RESULT})
        return frozenset(
            role
            for role in RESULT_ROLES
            if _RESULT in (self._try([question, calling, result | {"role": role}, answer], tools=_TOOLS) or "")
        )

    def _probe(self, answer: dict[str, Any], *, tools: list[Any] | None) -> str | None:
        """Return the text of a question with an answer; None if the template raises."""
        turns = [{"role": "user", "content": _QUESTION}, answer]
        if self._needs_parts:
            turns = [turn | {"content": as_parts(turn["content"])} for turn in turns]
        return self._try(turns, tools=tools)

    def _try(self, messages: Sequence[dict[str, Any]], *, tools: list[Any] | None = None) -> str | None:
        try:
            return self._apply(messages, tools)
        except RowRejectedError:
            return None


def find_dropped(text: str, messages: Sequence[dict[str, Any]], tools: Sequence[Any] | None) -> list[str]:
    """Return notes on what a template dropped: reasoning, texts beside tool calls, system messages, tools."""
    notes = []
    answers = [message for message in messages if message["role"] == "assistant"]
    thoughts = Counter(thought for answer in answers for thought in _read_thoughts(answer))
    if any(text.count(thought) < num_turns for thought, num_turns in thoughts.items()):
        notes.append(REASONING_DROPPED)
    for note, turns in (
        (WORDS_DROPPED, [answer for answer in answers if answer.get("tool_calls")]),
        (SYSTEM_DROPPED, [message for message in messages if message["role"] in ("system", "developer")]),
    ):
        if any(split_thought(read_words(turn))[1].strip() not in text for turn in turns):
            notes.append(note)
    functions = [tool.get("function", tool) for tool in tools or () if isinstance(tool, dict)]
    names = [function.get("name") for function in functions if isinstance(function, dict)]
    if any(isinstance(name, str) and name not in text for name in names):
        notes.append(TOOLS_DROPPED)
    return notes


def read_reasoning(message: dict[str, Any]) -> dict[str, str]:
    """Return the reasoning of a message by its key, without white space around it."""
    return {name: message[name].strip() for name in REASONING if message.get(name)}


def read_words(message: dict[str, Any]) -> str:
    """Return the content of a message as one text."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def split_thought(words: str) -> tuple[str, str]:
    r"""Return the thought that a content begins with, up to </think>, and the rest; "" and the content without one.

    Example:
        >>> split_thought("<think>\nhm\n</think>\n\nFour.")
        ('hm', '\n\nFour.')
    """
    thought, mark, rest = words.partition("</think>")
    return (thought.strip().removeprefix("<think>").strip(), rest) if mark else ("", words)


def _read_thoughts(message: dict[str, Any]) -> list[str]:
    """Return the thoughts of a message: its reasoning, and the thought in its content."""
    return [*read_reasoning(message).values(), *filter(None, [split_thought(read_words(message))[0]])]


def as_parts(text: str) -> list[dict[str, str]]:
    """Return a text as a list of content parts."""
    return [{"type": "text", "text": text}]


def _answer(**values: Any) -> dict[str, Any]:
    return {"role": "assistant", **values}


def _map_arguments(call: dict[str, Any], convert: Callable[[Any], Any]) -> dict[str, Any]:
    """Return a tool call, which has its arguments under "function" or itself, with converted arguments."""
    if "function" in call:
        return call | {"function": _map_arguments(call["function"], convert)}
    return call | {"arguments": convert(call["arguments"])} if "arguments" in call else call


def _to_text(arguments: Any) -> Any:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _to_object(arguments: Any) -> Any:
    return json.loads(arguments) if isinstance(arguments, str) else arguments
