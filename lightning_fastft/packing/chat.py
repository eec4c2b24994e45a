"""Conversations become text: the chat template renders them, and the assistant's characters are found exactly.

Characters and not tokens, because an assistant mask in tokens is lost where a tokenizer leaves white space out of its offsets.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from jinja2.exceptions import TemplateError

from lightning_fastft.errors import DataError
from lightning_fastft.packing.deadline import template_deadline
from lightning_fastft.packing.rows import TEMPLATE_REFUSED, TEMPLATE_UNCLEAR, WRONG_TYPE, RowRejectedError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_GENERATION_MARK = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
# What a template can raise on messages that it was not written for.
_TEMPLATE_ERRORS = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError, MemoryError)
# Stands at the end of a content to be found again in the rendered text: private-use characters, refused where the text has them already.
_SENTINEL = "\ue0f1\ue0f2\ue0f1"


class Rendered(NamedTuple):
    """A text and its trained characters: spans (begin, end), ascending; is_chat says that a template wrote first and last tokens too."""

    text: str
    spans: tuple[tuple[int, int], ...]
    is_chat: bool = False


def read_template(tokenizer: PreTrainedTokenizerBase, chosen: str | None) -> str | None:
    """Return the Jinja text of the chat template, None if the tokenizer has none.

    Args:
        tokenizer: Has the template unless one is chosen.
        chosen: Jinja text, a file that ends in .jinja, the name of one of the tokenizer's templates, or None for the tokenizer's own.

    Raises:
        DataError: The file cannot be read.
    """
    own = getattr(tokenizer, "chat_template", None)
    if chosen is not None and chosen.endswith(".jinja"):
        try:
            return Path(chosen).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"chat_template names the file {chosen}, which cannot be read: {error}") from error
    if isinstance(own, dict):
        return own.get("default" if chosen is None else chosen, chosen)
    return own if chosen is None else chosen


class ChatRenderer:
    """Render conversations and say which characters are the assistant's.

    With generation marks in the template they decide. Without them a turn is what the template adds between "asked for an answer" and "answer given":
    both are rendered and must be beginnings of the whole. Where a template renders earlier turns differently once later ones follow, the content is
    marked instead and searched; where that fails too, the row is rejected.

    Templates run in the sandbox of transformers: nothing of Python is reached, and no range is longer than 100,000. A template that takes more than
    two seconds of processor time for one conversation stops the run with a DataError; its memory is not bounded.

    Args:
        tokenizer: Applies the template.
        template: Jinja text of the template.
        loss_on: "completion" or "all".
        notes: Counts how turns were found.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, template: str, loss_on: str, notes: Counter[str]) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._loss_on = loss_on
        self._notes = notes
        self._has_marks = _GENERATION_MARK.search(template) is not None
        # Ends of turns are not always among the special tokens proper (<end_of_turn>, <|im_end|> as plain added tokens).
        added = {number: token.content for number, token in tokenizer.added_tokens_decoder.items() if token.content.strip()}
        self.special_ids = frozenset({*tokenizer.all_special_ids, *added})
        self._end_marks = tuple(sorted({*tokenizer.all_special_tokens, *added.values()}, key=len, reverse=True))

    def render(self, messages: Sequence[dict[str, Any]], *, num_context_turns: int = 0, tools: object = None) -> Rendered:
        """Return the conversation's text and the trained characters.

        Args:
            messages: Checked turns.
            num_context_turns: Turns at the beginning that are never trained: the prompt of a conversational prompt and completion.
            tools: A list of tool descriptions, or JSON text of one.

        Raises:
            RowRejectedError: The template refused the messages, or the assistant's turns cannot be told apart.
        """
        tool_list = _check_tools(tools)
        if self._loss_on == "all":
            text = self._apply(messages, tools=tool_list)
            return Rendered(text, ((0, len(text)),), is_chat=True)
        if self._has_marks:
            rendered = self._render_marked(messages, tools=tool_list)
            num_turns = sum(message["role"] == "assistant" for message in messages)
            num_wanted = sum(message["role"] == "assistant" for message in messages[num_context_turns:])
            if num_wanted == num_turns:
                return rendered
            if len(rendered.spans) == num_turns:
                return rendered._replace(spans=rendered.spans[num_turns - num_wanted :])
        return self._render_unmarked(messages, num_context_turns=num_context_turns, tools=tool_list)

    def _render_marked(self, messages: Sequence[dict[str, Any]], *, tools: list[Any] | None) -> Rendered:
        recorder = _CharacterTokenizer(self._tokenizer)
        with template_deadline(), _template_errors():
            result = type(self._tokenizer).apply_chat_template(
                recorder,
                list(messages),
                tools=tools,
                chat_template=self._template,
                tokenize=True,
                return_dict=True,
                return_assistant_tokens_mask=True,
            )
        mask = np.asarray([0, *result["assistant_masks"], 0], dtype=np.int8)
        turn = np.flatnonzero(np.diff(mask))
        return Rendered(result["input_ids"], tuple(zip(turn[::2].tolist(), turn[1::2].tolist())), is_chat=True)

    def _render_unmarked(self, messages: Sequence[dict[str, Any]], *, num_context_turns: int, tools: list[Any] | None) -> Rendered:
        text = self._apply(messages, tools=tools)
        spans: list[tuple[int, int]] = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant" or number < num_context_turns:
                continue
            begin = self._find_begin(messages, number, text=text, tools=tools)
            end = self._find_end(messages, number, text=text, tools=tools)
            if begin is None or end is None or begin >= end or (spans and begin < spans[-1][1]):
                raise RowRejectedError(
                    TEMPLATE_UNCLEAR, f"turn {number}: the template has no generation marks and renders it differently within the whole"
                )
            spans.append((begin, end))
        return Rendered(text, tuple(spans), is_chat=True)

    def _find_begin(self, messages: Sequence[dict[str, Any]], number: int, *, text: str, tools: list[Any] | None) -> int | None:
        """Return where the answer of a turn begins: behind the text that asks for it, else at its content."""
        if number:
            asked = self._apply(messages[:number], tools=tools, add_generation_prompt=True)
            if text.startswith(asked) and asked != self._apply(messages[:number], tools=tools):
                self._notes["assistant turns found by rendering what asks for them (the chat template has no generation marks)"] += 1
                return len(asked)
        place = self._find_mark(messages, number, text=text, tools=tools, before=True)
        if place is not None:
            self._notes["assistant turns found by marking their content (the chat template renders them differently within the whole)"] += 1
        return place

    def _find_end(self, messages: Sequence[dict[str, Any]], number: int, *, text: str, tools: list[Any] | None) -> int | None:
        """Return where a turn ends: with its end-of-turn token where one follows, without white space behind that."""
        answered = self._apply(messages[: number + 1], tools=tools)
        if text.startswith(answered):
            bare = answered.rstrip()
            return len(bare) if bare.endswith(self._end_marks) else len(answered)
        place = self._find_mark(messages, number, text=text, tools=tools, before=False)
        if place is None:
            return None
        return place + next((len(mark) for mark in self._end_marks if text.startswith(mark, place)), 0)

    def _find_mark(self, messages: Sequence[dict[str, Any]], number: int, *, text: str, tools: list[Any] | None, before: bool) -> int | None:
        """Return where a mark put before or behind a content comes out; None where the mark changes more than itself."""
        content = messages[number].get("content")
        if not isinstance(content, str) or _SENTINEL in text:
            return None
        marked = [*messages]
        marked[number] = {**messages[number], "content": _SENTINEL + content if before else content + _SENTINEL}
        place_text = self._apply(marked, tools=tools)
        place = place_text.find(_SENTINEL)
        return place if place >= 0 and place_text[:place] + place_text[place + len(_SENTINEL) :] == text else None

    def _apply(self, messages: Sequence[dict[str, Any]], *, tools: list[Any] | None, add_generation_prompt: bool = False) -> str:
        with template_deadline(), _template_errors():
            return str(
                self._tokenizer.apply_chat_template(
                    list(messages), tools=tools, chat_template=self._template, tokenize=False, add_generation_prompt=add_generation_prompt
                )
            )


@contextmanager
def _template_errors() -> Iterator[None]:
    """Reject a row where the template refuses it."""
    try:
        yield
    except _TEMPLATE_ERRORS as error:
        raise RowRejectedError(TEMPLATE_REFUSED, str(error)) from error


class _CharacterTokenizer:
    """Stand in for a tokenizer within apply_chat_template: its tokens are characters, so that the assistant mask comes back per character."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the tokenizer has
        return getattr(self._tokenizer, name)

    def __call__(self, text: str, **_: object) -> _Characters:
        return _Characters(input_ids=text)


class _Characters(dict[str, Any]):
    """What a tokenizer returns, for tokens that are characters."""

    def char_to_token(self, batch: int, character: int) -> int:
        return character


def _check_tools(tools: object) -> list[Any] | None:
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except ValueError as error:
            raise RowRejectedError(WRONG_TYPE, f"tools is a string and no JSON: {error}") from None
    if tools is not None and not isinstance(tools, (list, tuple)):
        raise RowRejectedError(WRONG_TYPE, f"tools must be a list, it is a {type(tools).__name__}")
    return list(tools) if tools else None
