"""Render conversations with a chat template and locate the characters of the assistant.

Spans are in characters, because a token mask is wrong for tokenizers that omit white space from their offsets.
"""

from __future__ import annotations

import copy
import functools
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import compress, dropwhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
from jinja2.exceptions import TemplateError

from lightning_fastft.core.errors import DataError
from lightning_fastft.packing.rows.messages import check_tools
from lightning_fastft.packing.rows.rejects import (
    TEMPLATE_DROPS,
    TEMPLATE_REFUSED,
    TEMPLATE_UNCLEAR,
    RowRejectedError,
)
from lightning_fastft.packing.tokens.control_tokens import QUOTED_CONTROL, USED_CONTROL, ControlTokens, Rendered
from lightning_fastft.packing.tokens.deadline import template_deadline
from lightning_fastft.packing.tokens.shapes import RESULT_ROLES, RESULTS_DROPPED, MessageShapes, as_parts, find_dropped
from lightning_fastft.packing.tokens.spans import find_repeated_turns
from lightning_fastft.packing.tokens.turn_ends import TurnEnds
from lightning_fastft.packing.tokens.turns import SENTINEL, Render, TurnFinder, find_lead, mark_name

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TokenizerT = TypeVar("TokenizerT", bound="PreTrainedTokenizerBase | None")
_GENERATION_MARK = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
# Errors of templates on messages that they were not written for.
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
# Sets of options whose renderers are kept.
_MOST_RENDERERS = 64
TRAINED_ANYWAY = "rows with turns of weight 0, which loss_on='all' trains"
BY_PROMPT = "assistant turns located by their generation prompt (the chat template has no generation marks)"
BY_SENTINEL = "assistant turns located by a sentinel (the chat template renders them differently if others follow)"
NOT_TRAINED = "rows with turns of weight 1 that are not the assistant's, which loss_on='completion' does not train"


def read_template(tokenizer: PreTrainedTokenizerBase, chosen: str | None) -> str | None:
    """Return the Jinja text of the chat template; None if there is none.

    The choice is Jinja text, a .jinja file, the name of one of the tokenizer's templates, or None for its default.

    Raises:
        DataError: The file cannot be read, or the text is not a template.
    """
    own = getattr(tokenizer, "chat_template", None)
    if chosen is not None and chosen.endswith(".jinja"):
        try:
            return Path(chosen).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"chat_template={chosen!r} cannot be read: {error}") from error
    if chosen is not None and "{" not in chosen and not (isinstance(own, dict) and chosen in own):
        names = f", and the tokenizer has only templates named {', '.join(own)}" if isinstance(own, dict) else ""
        raise DataError(
            f"chat_template={chosen!r} is neither a .jinja file nor a template, which has {{{{ }}}}{names}. Give a "
            "file: --data.chat_template FILE.jinja"
        )
    if isinstance(own, dict):
        return own.get("default" if chosen is None else chosen, chosen)
    return own if chosen is None else chosen


def with_template(tokenizer: TokenizerT, template: str | None) -> TokenizerT:
    """Return a tokenizer whose chat template is a text: the given one if it has it, else a copy that shares its parts.

    None keeps the template of the tokenizer.
    """
    if tokenizer is None or template is None or tokenizer.chat_template == template:
        return tokenizer
    copied = copy.copy(tokenizer)
    copied.chat_template = template
    return copied


class ChatRenderer:
    """Render conversations and locate the characters of the assistant.

    Generation marks of the template are used if it has them. Otherwise a TurnFinder locates the turns, and the row is
    rejected if it fails.

    Answers that an unmarked template ends without a token get the one at which generation stops (TurnEnds), unless
    stop_ids is None.

    Templates run in the sandbox of transformers, without access to Python and with ranges of at most 100,000. A
    template that takes more than two seconds of CPU time for one conversation stops the run with a DataError. Its
    memory is not limited.

    The options are variables of the template with JSON values, such as enable_thinking.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        template: str,
        loss_on: str,
        notes: Counter[str],
        stop_ids: Sequence[int] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._options = dict(options or {})
        self._stop_ids = stop_ids
        self._others: dict[str, ChatRenderer] = {}
        self._template = template
        self._loss_on = loss_on
        self._notes = notes
        self._has_marks = _GENERATION_MARK.search(template) is not None
        # End-of-turn tokens such as <end_of_turn> may be plain added tokens instead of special tokens.
        added = {
            number: token.content for number, token in tokenizer.added_tokens_decoder.items() if token.content.strip()
        }
        self._special_ids = frozenset({*tokenizer.all_special_ids, *added})
        self._end_marks = tuple(sorted({*tokenizer.all_special_tokens, *added.values()}, key=len, reverse=True))
        self.controls = ControlTokens(tokenizer)
        self._shapes = MessageShapes(lambda messages, tools: self._apply(messages, tools=tools))
        self._ends: TurnEnds | None = None
        if stop_ids is not None and not self._has_marks:
            self._ends = TurnEnds(tokenizer, stop_ids=stop_ids, shape=self._shapes.shape)

    def with_options(self, options: Mapping[str, Any]) -> ChatRenderer:
        """Return the renderer of the template with more options, on which the shapes that it reads may depend."""
        options = {**self._options, **options}
        if options == self._options:
            return self
        name = json.dumps(options, sort_keys=True)
        if name not in self._others:
            if len(self._others) == _MOST_RENDERERS:
                self._others.clear()
            self._others[name] = ChatRenderer(
                self._tokenizer,
                template=self._template,
                loss_on=self._loss_on,
                notes=self._notes,
                stop_ids=self._stop_ids,
                options=options,
            )
        return self._others[name]

    def render(
        self, messages: Sequence[dict[str, Any]], *, num_context_turns: int = 0, tools: object = None
    ) -> Rendered:
        """Return the text of a conversation and its trained character spans.

        The first num_context_turns messages are never trained: the prompt of a conversational prompt and completion.

        Raises:
            RowRejectedError: The template raised an error, or the assistant's turns cannot be located.
        """
        tool_list = check_tools(tools)
        notes: list[str] = []
        answers = [message for message in messages if message["role"] == "assistant"]
        if any(message.get("weight") == 0 for message in answers) and self._loss_on == "all":
            notes.append(TRAINED_ANYWAY)
        if any(message.get("weight") == 1 for message in messages) and self._loss_on != "all":
            notes.append(NOT_TRAINED)
        notes += find_repeated_turns(messages, num_context_turns=num_context_turns)
        is_wanted = [message.get("weight", 1) != 0 for message in answers]
        for number in range(sum(message["role"] == "assistant" for message in messages[:num_context_turns])):
            is_wanted[number] = False
        turns, tool_list, found = self.controls.quote(messages, tool_list)
        notes += found
        shaped = self._shapes.shape(turns)
        self._check_calls(shaped, tools=tool_list)
        rendered = self._render(shaped, is_wanted=is_wanted, tools=tool_list)
        if self._ends is not None:
            rendered = self._ends.extend(rendered)
            if messages[-1]["role"] == "assistant" and is_wanted[-1]:
                rendered = self._ends.close(rendered, shaped, self._renderer(tool_list))
        notes += [*rendered.notes, *find_dropped(rendered.text, shaped, tool_list)]
        if self._drops_results(shaped, tools=tool_list):
            notes.append(RESULTS_DROPPED)
        if QUOTED_CONTROL in found and not self.controls.can_read_as_text(rendered):
            notes[notes.index(QUOTED_CONTROL)] = USED_CONTROL
            return self.controls.unquote(rendered)._replace(notes=tuple(notes))
        return rendered._replace(is_quoted=QUOTED_CONTROL in found, notes=tuple(notes))

    def render_prompt(self, messages: Sequence[dict[str, Any]], *, tools: object = None) -> Rendered:
        """Return the text of a conversation up to where the assistant begins its next turn; nothing is trained.

        Raises:
            RowRejectedError: The template raised an error, or drops a tool call.
        """
        turns, tool_list, found = self.controls.quote(messages, check_tools(tools))
        shaped = self._shapes.shape(turns)
        self._check_calls(shaped, tools=tool_list)
        text = self._apply(shaped, tools=tool_list, add_generation_prompt=True)
        rendered = Rendered(text, (), is_chat=True, is_quoted=QUOTED_CONTROL in found)
        if rendered.is_quoted and not self.controls.can_read_as_text(rendered):
            return self.controls.unquote(rendered)
        return rendered

    def ends_with_control(self, ids: Sequence[int]) -> bool:
        """Return whether ids end with a control token, white space aside: marks often hold the line break behind it."""
        words = dropwhile(lambda token: not self._tokenizer.decode([token]).strip(), reversed(ids))
        return next(words, None) in self._special_ids

    def _render(
        self, messages: Sequence[dict[str, Any]], *, is_wanted: Sequence[bool], tools: list[Any] | None
    ) -> Rendered:
        """Render the messages; is_wanted has one trained flag per assistant turn."""
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
                **self._options,
            )
        mask = np.asarray([0, *result["assistant_masks"], 0], dtype=np.int8)
        turn = np.flatnonzero(np.diff(mask))
        return Rendered(result["input_ids"], tuple(zip(turn[::2].tolist(), turn[1::2].tolist())), is_chat=True)

    def _render_unmarked(
        self, messages: Sequence[dict[str, Any]], *, is_wanted: Sequence[bool], tools: list[Any] | None
    ) -> Rendered:
        text = self._apply(messages, tools=tools)
        finder = TurnFinder(
            messages,
            text=text,
            render=self._renderer(tools),
            end_marks=self._end_marks,
            lead=self._lead,
        )
        spans: list[tuple[int, int]] = []
        answers = (number for number, message in enumerate(messages) if message["role"] == "assistant")
        for number in compress(answers, is_wanted):
            span = finder.find(number)
            if span is None or (spans and span[0] < spans[-1][1]):
                raise RowRejectedError(TEMPLATE_UNCLEAR, f"turn {number}: {finder.explain(number)}")
            spans.append(span)
        for note, count in ((BY_PROMPT, finder.num_by_prompt), (BY_SENTINEL, finder.num_by_sentinel)):
            if count:
                self._notes[note] += count
        return Rendered(text, tuple(spans), is_chat=True)

    @functools.cached_property
    def _lead(self) -> str:
        """What the template writes between the generation prompt and an answer."""
        question, answer = {"role": "user", "content": "58126934"}, {"role": "assistant", "content": SENTINEL}
        return find_lead(self._shapes.shape([question, answer]), self._renderer(None))

    def _check_calls(self, messages: Sequence[dict[str, Any]], *, tools: list[Any] | None) -> None:
        """Raise RowRejectedError if the template drops a tool call, such as the second one of a turn."""
        marked: list[dict[str, Any]] = []
        places: dict[str, tuple[int, int]] = {}
        for number, message in enumerate(messages):
            if message.get("tool_calls"):
                marks = [f"{SENTINEL}{number}.{place}{SENTINEL}" for place in range(len(message["tool_calls"]))]
                message = message | {"tool_calls": [*map(mark_name, message["tool_calls"], marks)]}
                places |= {mark: (number, place) for place, mark in enumerate(marks)}
            marked.append(message)
        if not places:
            return
        render = self._renderer(tools)
        shown = render(marked, False)
        for mark, (number, place) in places.items():
            # A template may show the arguments alone.
            if shown is not None and mark not in shown and render(_without_call(marked, number, place), False) == shown:
                raise RowRejectedError(TEMPLATE_DROPS, f"a tool call of turn {number}; give chat_template")

    def _drops_results(self, messages: Sequence[dict[str, Any]], *, tools: list[Any] | None) -> bool:
        """Return whether the template drops the result of a tool, such as one behind no call."""
        marked: list[dict[str, Any]] = []
        marks: list[str] = []
        for number, message in enumerate(messages):
            if message["role"] in RESULT_ROLES:
                marks.append(f"{SENTINEL}{number}{SENTINEL}")
                is_in_parts = isinstance(message.get("content"), list)
                message = message | {"content": as_parts(marks[-1]) if is_in_parts else marks[-1]}
            marked.append(message)
        shown = self._renderer(tools)(marked, False) if marks else None
        return shown is not None and any(mark not in shown for mark in marks)

    def _renderer(self, tools: list[Any] | None) -> Render:
        """Return a function that renders messages, or returns None if the template refuses them."""

        def render(messages: Sequence[dict[str, Any]], add_generation_prompt: bool) -> str | None:
            try:
                return self._apply(messages, tools=tools, add_generation_prompt=add_generation_prompt)
            except RowRejectedError:
                return None

        return render

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
                    **self._options,
                )
            )


def _without_call(messages: Sequence[dict[str, Any]], number: int, place: int) -> list[dict[str, Any]]:
    """Return messages without one tool call of one of them."""
    calls = messages[number]["tool_calls"]
    less = messages[number] | {"tool_calls": [*calls[:place], *calls[place + 1 :]]}
    return [*messages[:number], less, *messages[number + 1 :]]


@contextmanager
def _template_errors() -> Iterator[None]:
    """Turn errors of a template into the rejection of the row."""
    try:
        yield
    except _TEMPLATE_ERRORS as error:
        raise RowRejectedError(TEMPLATE_REFUSED, str(error)) from error


class _CharacterTokenizer:
    """A tokenizer of single characters, so that apply_chat_template returns an assistant mask per character."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, text: str, **_: object) -> _Characters:
        return _Characters(input_ids=text)


class _Characters(dict[str, Any]):
    """The output of _CharacterTokenizer.

    transformers 5.24 reads ``encodings`` for the mask, earlier versions call ``char_to_token``.
    """

    @property
    def encodings(self) -> list[_Offsets]:
        """The characters of each token, which is one character."""
        length = len(self["input_ids"])
        return [_Offsets(zip(range(length), range(1, length + 1)))]

    def char_to_token(self, batch: int, character: int) -> int:
        return character


class _Offsets(NamedTuple):
    """What transformers reads of an encoding."""

    offsets: Iterable[tuple[int, int]]
