"""Tokenise control tokens in user text as plain text."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from lightning_fastft.packing.images import ImageFile

# Enclose the index of a control token that a user wrote.
_QUOTE, _END_QUOTE = "\ue0f3", "\ue0f4"

_QUOTED = re.compile(f"{_QUOTE}([0-9]+){_END_QUOTE}")

# Enclose control tokens of the template, to tell them from the same characters in user text.
_MARK, _END_MARK = "\ue0f5", "\ue0f6"

_PRIVATE = frozenset((_QUOTE, _END_QUOTE, _MARK, _END_MARK))

QUOTED_CONTROL = "rows whose questions hold control tokens of the tokenizer, which are read as plain text"

USED_CONTROL = (
    "rows whose questions hold control tokens, which this tokenizer cannot read as plain text: they act as control "
    "tokens"
)

ANSWERED_CONTROL = "rows whose answers hold control tokens of the tokenizer; they are trained as such"


class Rendered(NamedTuple):
    """A text with its trained character spans (begin, end), ascending.

    is_chat: a template added the first and last tokens. is_quoted: control tokens of a user are replaced by indices.
    notes: remarks on the row. images: the images of its placeholders, in order.
    """

    text: str
    spans: tuple[tuple[int, int], ...]
    is_chat: bool = False
    is_quoted: bool = False
    notes: tuple[str, ...] = ()
    images: tuple[ImageFile, ...] = ()


class ControlTokens:
    """Tokenise control tokens in user text as plain text.

    A tokenizer would read ``<|im_end|>`` inside a question as the end of the turn. So each one is replaced by an index
    before the template renders the question. Then the template's own control tokens are marked, the indices become
    text again, and a copy of the tokenizer, which recognises only marked control tokens, encodes the text.

    Args:
        tokenizer: A slow tokenizer cannot be copied: control tokens keep their meaning, and rows get a note.
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
        """Return messages and tools with control tokens of users replaced by indices, and notes on the row."""
        notes = []
        answers = [message for message in messages if message["role"] == "assistant"]
        questions = [message for message in messages if message["role"] != "assistant"]
        if self._is_in(answers):
            notes.append(ANSWERED_CONTROL)
        if self._is_in(questions) or self._is_in(tools):
            texts = _walk_strings([*messages, tools])
            if not self._tokenizer.is_fast or any(character in text for text in texts for character in _PRIVATE):
                return messages, tools, [*notes, USED_CONTROL]
            messages = [message if message["role"] == "assistant" else self._quote_all(message) for message in messages]
            return messages, self._quote_all(tools), [*notes, QUOTED_CONTROL]
        return messages, tools, notes

    def encode(self, rendered: Rendered) -> tuple[Any, Rendered]:
        """Return the tokenizer output (a batch of one) of a quoted text, and the encoded text with its spans."""
        text, places = self._mark(rendered.text)
        spans = tuple((places[begin], places[end]) for begin, end in rendered.spans)
        return self._tokenize_copy(text), rendered._replace(text=text, spans=spans)

    def can_read_as_text(self, rendered: Rendered) -> bool:
        """Return whether the copy encodes this text as the tokenizer does, except for quoted control tokens.

        False if the tokenizer's model builds a control token from plain characters, or if the copy differs elsewhere.
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
        """Return the text with indices replaced by the control tokens that the user wrote."""
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
        """The copy of the tokenizer, which recognises only marked control tokens."""
        assert self._copy is not None, "call encode first"
        return self._copy

    def own_ids(self, ids: Sequence[int]) -> list[int]:
        """Return the ids of the original tokenizer for ids of the copy."""
        return [self._own_ids.get(token, token) for token in ids]

    def _is_in(self, value: object) -> bool:
        return any(self._pattern.search(text) for text in _walk_strings(value))

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
        """Return the text with marked control tokens and plain quoted ones, and the new place of each character."""
        parts: list[str] = []
        places: list[int] = []
        length = 0

        def add(piece: str, num_characters: int) -> None:
            nonlocal length
            # A span begins and ends at a piece, never inside one.
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
        # A control token of the base vocabulary becomes an added token in the copy, which shifts later added ids.
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
