"""Conversations become text: the chat template renders them, and the assistant's characters are found exactly.

Characters and not tokens, because an assistant mask in tokens is lost where a tokenizer leaves white space out of its
offsets.
"""

from __future__ import annotations

import copy
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from jinja2.exceptions import TemplateError

from lightning_fastft.core.errors import DataError
from lightning_fastft.packing.deadline import template_deadline
from lightning_fastft.packing.rows import TEMPLATE_REFUSED, TEMPLATE_UNCLEAR, WRONG_TYPE, RowRejectedError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_GENERATION_MARK = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
# What a template can raise on messages that it was not written for.
_TEMPLATE_ERRORS = (
    TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
    MemoryError,
)
# Stands at the end of a content to be found again in the rendered text: private-use characters, refused where the text
# has them already.
_SENTINEL = "\ue0f1\ue0f2\ue0f1"


# Around the number of a control token that was written by a user and is to be read as text.
_QUOTE, _END_QUOTE = "\ue0f3", "\ue0f4"
_QUOTED = re.compile(f"{_QUOTE}([0-9]+){_END_QUOTE}")
# Around control tokens of the template, in texts that hold the same characters as plain text.
_MARK, _END_MARK = "\ue0f5", "\ue0f6"
_PRIVATE = frozenset((_QUOTE, _END_QUOTE, _MARK, _END_MARK))

# Contents that no filter of a template changes.
_PROBES = {"user": "40917263", "assistant": "58126934"}

QUOTED_CONTROL = "rows whose questions hold control tokens of the tokenizer, which are read as plain text"
USED_CONTROL = (
    "rows whose questions hold control tokens, which this tokenizer cannot read as plain text: they act as "
    "control tokens"
)
ANSWERED_CONTROL = "rows whose answers hold control tokens of the tokenizer; they are trained as such"
TRAINED_ANYWAY = "rows with turns of weight 0, which loss_on='all' trains"


class Rendered(NamedTuple):
    """A text and its trained characters: spans (begin, end), ascending.

    is_chat says that a template wrote first and last tokens too, is_quoted that the text holds numbers in place of
    control tokens of a user, and notes what a person should know about the row.
    """

    text: str
    spans: tuple[tuple[int, int], ...]
    is_chat: bool = False
    is_quoted: bool = False
    notes: tuple[str, ...] = ()


def read_template(tokenizer: PreTrainedTokenizerBase, chosen: str | None) -> str | None:
    """Return the Jinja text of the chat template, None if the tokenizer has none.

    Args:
        tokenizer: Has the template unless one is chosen.
        chosen: Jinja text, a file that ends in .jinja, the name of one of the tokenizer's templates, or None for the
            tokenizer's own.

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

    With generation marks in the template they decide. Without them a turn is what the template adds between "asked for
    an answer" and "answer given":
    both are rendered and must be beginnings of the whole. Where a template renders earlier turns differently once later
    ones follow, the content is marked instead and searched; where that fails too, the row is rejected.

    Templates run in the sandbox of transformers: nothing of Python is reached, and no range is longer than 100,000. A
    template that takes more than two seconds of processor time for one conversation stops the run with a DataError; its
    memory is not bounded.

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
        # Ends of turns are not always among the special tokens proper (<end_of_turn>, <|im_end|> as plain added
        # tokens).
        added = {
            number: token.content for number, token in tokenizer.added_tokens_decoder.items() if token.content.strip()
        }
        self.special_ids = frozenset({*tokenizer.all_special_ids, *added})
        self._end_marks = tuple(sorted({*tokenizer.all_special_tokens, *added.values()}, key=len, reverse=True))
        self.controls = ControlTokens(tokenizer)
        self._needs_parts: bool | None = None
        self._drops_answers = False

    def render(
        self, messages: Sequence[dict[str, Any]], *, num_context_turns: int = 0, tools: object = None
    ) -> Rendered:
        """Return the conversation's text and the trained characters.

        Args:
            messages: Checked turns.
            num_context_turns: Turns at the beginning that are never trained: the prompt of a conversational prompt and
                completion.
            tools: A list of tool descriptions, or JSON text of one.

        Raises:
            RowRejectedError: The template refused the messages, or the assistant's turns cannot be told apart.
        """
        tool_list = _check_tools(tools)
        notes: list[str] = []
        answers = [message for message in messages if message["role"] == "assistant"]
        if any(message.get("weight") == 0 for message in answers) and self._loss_on == "all":
            notes.append(TRAINED_ANYWAY)
        is_wanted = [message.get("weight", 1) != 0 for message in answers]
        for number in range(sum(message["role"] == "assistant" for message in messages[:num_context_turns])):
            is_wanted[number] = False
        turns, tool_list, found = self.controls.quote(messages, tool_list)
        notes += found
        rendered = self._render(self._shape(turns), is_wanted=is_wanted, tools=tool_list)
        if QUOTED_CONTROL in found and not self.controls.can_read_as_text(rendered):
            notes[notes.index(QUOTED_CONTROL)] = USED_CONTROL
            return self.controls.unquote(rendered)._replace(notes=tuple(notes))
        return rendered._replace(is_quoted=QUOTED_CONTROL in found, notes=tuple(notes))

    def _render(
        self, messages: Sequence[dict[str, Any]], *, is_wanted: Sequence[bool], tools: list[Any] | None
    ) -> Rendered:
        """Render; is_wanted says for each turn of the assistant whether it is trained."""
        if self._loss_on == "all":
            text = self._apply(messages, tools=tools)
            return Rendered(text, ((0, len(text)),), is_chat=True)
        if self._has_marks:
            rendered = self._render_marked(messages, tools=tools)
            if all(is_wanted):
                return rendered
            if len(rendered.spans) == len(is_wanted):
                return rendered._replace(spans=tuple(compress(rendered.spans, is_wanted)))
        return self._render_unmarked(messages, is_wanted=is_wanted, tools=tools)

    def _shape(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the turns as the template takes them: without weights, and with content in parts where it drops
        strings.
        """
        if self._needs_parts is None:
            as_text, as_parts = self._find_kept(lambda text: text), self._find_kept(_as_parts)
            self._needs_parts = as_text != _PROBES.keys() and as_parts == _PROBES.keys()
            # A template that refuses the probe says what it wants when it is given a row.
            self._drops_answers = (
                as_text is not None and "assistant" not in as_text and "assistant" not in (as_parts or ())
            )
        if self._drops_answers and any(
            message["role"] == "assistant" and message.get("content") for message in messages
        ):
            raise RowRejectedError(TEMPLATE_UNCLEAR, "the template leaves the content of the assistant's turns out")
        turns = [{name: value for name, value in message.items() if name != "weight"} for message in messages]
        if self._needs_parts:
            turns = [
                turn | {"content": _as_parts(turn["content"])} if isinstance(turn.get("content"), str) else turn
                for turn in turns
            ]
        return turns

    def _find_kept(self, shape: Callable[[str], Any]) -> set[str] | None:
        """Return the roles whose content of this shape the template renders; None where it refuses."""
        try:
            text = self._apply([{"role": role, "content": shape(word)} for role, word in _PROBES.items()], tools=None)
        except RowRejectedError:
            return None
        return {role for role, word in _PROBES.items() if word in text}

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

    def _render_unmarked(
        self, messages: Sequence[dict[str, Any]], *, is_wanted: Sequence[bool], tools: list[Any] | None
    ) -> Rendered:
        text = self._apply(messages, tools=tools)
        spans: list[tuple[int, int]] = []
        answers = (number for number, message in enumerate(messages) if message["role"] == "assistant")
        for number in compress(answers, is_wanted):
            begin = self._find_begin(messages, number, text=text, tools=tools)
            end = self._find_end(messages, number, text=text, tools=tools)
            if begin is None or end is None or begin >= end or (spans and begin < spans[-1][1]):
                raise RowRejectedError(
                    TEMPLATE_UNCLEAR,
                    f"turn {number}: the template has no generation marks and renders it differently within the whole",
                )
            spans.append((begin, end))
        return Rendered(text, tuple(spans), is_chat=True)

    def _find_begin(
        self, messages: Sequence[dict[str, Any]], number: int, *, text: str, tools: list[Any] | None
    ) -> int | None:
        """Return where the answer of a turn begins: behind the text that asks for it, else at its content."""
        if number:
            asked = self._apply(messages[:number], tools=tools, add_generation_prompt=True)
            if text.startswith(asked) and asked != self._apply(messages[:number], tools=tools):
                self._notes[
                    "assistant turns found by rendering what asks for them (the chat template has no generation marks)"
                ] += 1
                return len(asked)
        place = self._find_mark(messages, number, text=text, tools=tools, before=True)
        if place is not None:
            self._notes[
                "assistant turns found by marking their content (the chat template renders them differently within the "
                "whole)"
            ] += 1
        return place

    def _find_end(
        self, messages: Sequence[dict[str, Any]], number: int, *, text: str, tools: list[Any] | None
    ) -> int | None:
        """Return where a turn ends: with its end-of-turn token where one follows, without white space behind that."""
        answered = self._apply(messages[: number + 1], tools=tools)
        if text.startswith(answered):
            bare = answered.rstrip()
            return len(bare) if bare.endswith(self._end_marks) else len(answered)
        place = self._find_mark(messages, number, text=text, tools=tools, before=False)
        if place is None:
            return None
        return place + next((len(mark) for mark in self._end_marks if text.startswith(mark, place)), 0)

    def _find_mark(
        self, messages: Sequence[dict[str, Any]], number: int, *, text: str, tools: list[Any] | None, before: bool
    ) -> int | None:
        """Return where a mark put before or behind a content comes out; None where the mark changes more than
        itself.
        """
        content = messages[number].get("content")
        words = content if isinstance(content, str) else "".join(part["text"] for part in content or ())
        if content is None or _SENTINEL in text:
            return None
        marked = [*messages]
        words = _SENTINEL + words if before else words + _SENTINEL
        marked[number] = {**messages[number], "content": words if isinstance(content, str) else _as_parts(words)}
        place_text = self._apply(marked, tools=tools)
        place = place_text.find(_SENTINEL)
        return place if place >= 0 and place_text[:place] + place_text[place + len(_SENTINEL) :] == text else None

    def _apply(
        self, messages: Sequence[dict[str, Any]], *, tools: list[Any] | None, add_generation_prompt: bool = False
    ) -> str:
        with template_deadline(), _template_errors():
            return str(
                self._tokenizer.apply_chat_template(
                    list(messages),
                    tools=tools,
                    chat_template=self._template,
                    tokenize=False,
                    add_generation_prompt=add_generation_prompt,
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
    """Stand in for a tokenizer within apply_chat_template: its tokens are characters, so that the assistant mask
    comes back per character.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, text: str, **_: object) -> _Characters:
        return _Characters(input_ids=text)


class _Characters(dict[str, Any]):
    """What a tokenizer returns, for tokens that are characters."""

    def char_to_token(self, batch: int, character: int) -> int:
        return character


def _as_parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


class ControlTokens:
    """Find the control tokens of a tokenizer in what users wrote, and tokenise them there as the plain text that they
    are.

    A tokenizer takes ``<|im_end|>`` inside a question for the end of the turn. Each one in a question is replaced by a
    number before the template renders it. Then the template's own control tokens are marked, the numbers become text
    again, and a copy of the tokenizer reads that: it knows control tokens by their marks alone.

    Args:
        tokenizer: A slow one has no copy: control tokens stay what they are, and rows are noted.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        special = {
            token.content for token in tokenizer.added_tokens_decoder.values() if token.special and token.content
        }
        self._words = sorted(
            {*special, *(word for word in tokenizer.all_special_tokens if word)}, key=lambda word: (-len(word), word)
        )
        self._pattern = re.compile("|".join(map(re.escape, self._words)) or "(?!)")
        self._number = {word: number for number, word in enumerate(self._words)}
        self._copy: PreTrainedTokenizerBase | None = None
        self._own_ids: dict[int, int] = {}

    def quote(
        self, messages: Sequence[dict[str, Any]], tools: list[Any] | None
    ) -> tuple[Sequence[dict[str, Any]], list[Any] | None, list[str]]:
        """Return messages and tools with numbers in place of control tokens that users wrote, and what to note."""
        notes = []
        answers = [message for message in messages if message["role"] == "assistant"]
        questions = [message for message in messages if message["role"] != "assistant"]
        if self._is_in(answers):
            notes.append(ANSWERED_CONTROL)
        if self._is_in(questions) or self._is_in(tools):
            if not self._tokenizer.is_fast or self._holds([*messages, tools], _PRIVATE):
                return messages, tools, [*notes, USED_CONTROL]
            messages = [message if message["role"] == "assistant" else self._quote_all(message) for message in messages]
            return messages, self._quote_all(tools), [*notes, QUOTED_CONTROL]
        return messages, tools, notes

    def encode(self, rendered: Rendered) -> tuple[Any, Rendered]:
        """Return the tokens of a quoted text, as a tokenizer returns those of a batch of one, and the text they
        stand for, with its spans.
        """
        text, places = self._mark(rendered.text)
        spans = tuple((places[begin], places[end]) for begin, end in rendered.spans)
        return self._tokenize_copy(text), rendered._replace(text=text, spans=spans)

    def can_read_as_text(self, rendered: Rendered) -> bool:
        """Say whether the copy reads this text as the tokenizer does, but for the quoted control tokens, which it reads
        as text.

        A tokenizer whose model makes a control token of plain characters, or a copy that differs elsewhere, cannot
        serve.
        """
        plain = self.unquote(rendered)
        alike, _ = self._mark(plain.text)
        own = self._tokenizer([plain.text], add_special_tokens=False, return_attention_mask=False, verbose=False)[
            "input_ids"
        ][0]
        if self.own_ids(self._tokenize_copy(alike)["input_ids"][0]) != list(own):
            return False
        text, _ = self._mark(rendered.text)
        ids = self.own_ids(self._tokenize_copy(text)["input_ids"][0])
        control_ids = {self._tokenizer.convert_tokens_to_ids(word) for word in self._words}
        return sum(token in control_ids for token in ids) == text.count(_END_MARK)

    def unquote(self, rendered: Rendered) -> Rendered:
        """Return the text with the control tokens that a user wrote in place of their numbers."""
        parts, places, begin, length = [], [0] * (len(rendered.text) + 1), 0, 0
        for found in [*_QUOTED.finditer(rendered.text), None]:
            end = len(rendered.text) if found is None else found.start()
            parts.append(rendered.text[begin:end])
            places[begin : end + 1] = range(length, length + end - begin + 1)
            length += end - begin
            if found is not None:
                parts.append(self._words[int(found.group(1))])
                length += len(parts[-1])
                begin = found.end()
                places[begin] = length
        spans = tuple((places[first], places[last]) for first, last in rendered.spans)
        return rendered._replace(text="".join(parts), spans=spans, is_quoted=False)

    def _tokenize_copy(self, text: str) -> Any:
        if self._copy is None:
            self._copy = self._make_copy()
        return self._copy([text], add_special_tokens=False, return_attention_mask=False, verbose=False)

    @property
    def marked(self) -> PreTrainedTokenizerBase:
        """The tokenizer that knows control tokens by their marks."""
        assert self._copy is not None, "encode comes first"
        return self._copy

    def own_ids(self, ids: Sequence[int]) -> list[int]:
        """Return the tokenizer's own ids for those of the copy."""
        return [self._own_ids.get(token, token) for token in ids]

    def _is_in(self, value: object) -> bool:
        return any(self._pattern.search(text) for text in _walk_strings(value))

    def _holds(self, value: object, characters: frozenset[str]) -> bool:
        return any(character in text for text in _walk_strings(value) for character in characters)

    def _quote_all(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._pattern.sub(lambda found: f"{_QUOTE}{self._number[found.group()]}{_END_QUOTE}", value)
        if isinstance(value, dict):
            return {
                self._quote_all(name): entry if name == "role" else self._quote_all(entry)
                for name, entry in value.items()
            }
        return [self._quote_all(entry) for entry in value] if isinstance(value, (list, tuple)) else value

    def _mark(self, text: str) -> tuple[str, list[int]]:
        """Return the text with marked control tokens and plain quoted ones, and the place there of each character
        here.
        """
        parts: list[str] = []
        places: list[int] = []
        length = 0

        def add(piece: str, num_characters: int) -> None:
            nonlocal length
            # A span may begin or end at a piece, never inside one.
            places.extend(
                [length] + [length + len(piece)] * (num_characters - 1)
                if num_characters != len(piece)
                else range(length, length + len(piece))
            )
            parts.append(piece)
            length += len(piece)

        begin = 0
        for found in re.finditer(f"{_QUOTED.pattern}|{self._pattern.pattern}", text):
            add(text[begin : found.start()], found.start() - begin)
            word = found.group()
            add(self._words[int(found.group(1))] if found.group(1) else f"{_MARK}{word}{_END_MARK}", len(word))
            begin = found.end()
        add(text[begin:], len(text) - begin)
        return "".join(parts), [*places, length]

    def _make_copy(self) -> PreTrainedTokenizerBase:
        state = json.loads(self._tokenizer.backend_tokenizer.to_str())
        state["post_processor"] = state["truncation"] = state["padding"] = None
        own_ids = {}
        for token in state["added_tokens"]:
            if token["content"] in self._number:
                token["content"] = f"{_MARK}{token['content']}{_END_MARK}"
            own_ids[token["content"]] = token["id"]
        backend = type(self._tokenizer.backend_tokenizer).from_str(json.dumps(state))
        # A control token of the model's own vocabulary is a new one in the copy, which shifts the ids of all added
        # tokens behind it.
        self._own_ids = {
            number: own_id
            for content, own_id in own_ids.items()
            if (number := backend.token_to_id(content)) is not None
        }
        copied = copy.copy(self._tokenizer)
        copied._tokenizer = backend
        return copied


def _walk_strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, entry in value.items():
            yield str(name)
            if name != "role":
                yield from _walk_strings(entry)
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from _walk_strings(entry)


def _check_tools(tools: object) -> list[Any] | None:
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except ValueError as error:
            raise RowRejectedError(WRONG_TYPE, f"tools is a string and no JSON: {error}") from None
    if tools is not None and not isinstance(tools, (list, tuple)):
        raise RowRejectedError(WRONG_TYPE, f"tools must be a list, it is a {type(tools).__name__}")
    return list(tools) if tools else None
