"""Locate the assistant's turns in a conversation whose template has no generation marks.

The conversation is rendered up to the generation prompt and up to the end of a turn; the answer is the difference. Both
texts must be prefixes of the whole text. They are not if a template renders a turn differently once later turns follow;
then a sentinel is inserted into the turn and searched for.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from lightning_fastft.packing.rows.messages import REASONING
from lightning_fastft.packing.tokens.shapes import as_parts, read_reasoning, read_words, split_thought

# Inserted into a turn to find it in the rendered text: private-use characters, which the text must not contain.
SENTINEL = "\ue0f1\ue0f2\ue0f1"

Messages = Sequence[dict[str, Any]]
# Returns the text of messages, with a generation prompt if asked; None if the template refuses them.
Render = Callable[[Messages, bool], str | None]


class _CallPlace(NamedTuple):
    """Characters at which an answer with tool calls starts, its first call is, and the answer ends; None if unclear."""

    begin: int | None
    first: int
    end: int | None


class TurnFinder:
    """Locate the assistant's turns in one conversation.

    Args:
        messages: The conversation.
        text: Its text.
        render: Renders parts of it.
        end_marks: The tokenizer's control tokens, longest first.
        lead: What the template writes between the generation prompt and an answer.
    """

    def __init__(self, messages: Messages, *, text: str, render: Render, end_marks: Sequence[str], lead: str) -> None:
        self._messages = messages
        self._text = text
        self._render = render
        self._end_marks = tuple(end_marks)
        self._lead = lead
        self.num_by_prompt = self.num_by_sentinel = 0

    def find(self, number: int) -> tuple[int, int] | None:
        """Return the first character of a turn's answer and the one past its last; None if they cannot be located."""
        turn = _Turn(self._messages, number, self._render)
        begin = end = None
        if turn.asked is not None and turn.has_prompt and self._text.startswith(turn.asked):
            begin = len(turn.asked)
            self.num_by_prompt += 1
        if turn.answered is not None and self._text.startswith(turn.answered):
            end = len(self._strip_end(turn.answered))
        if begin is None or end is None:
            begin, found = self._find_by_sentinel(turn, begin, end)
            end = found if end is None else end
            begin = self._find_bare(turn) if begin is None else begin
        return (begin, end) if begin is not None and end is not None and begin < end else None

    def explain(self, number: int) -> str:
        """Return why the answer of a turn is not found, and what to change."""
        turn = _Turn(self._messages, number, self._render)
        if turn.message.get("tool_calls") and self._is_text_moved(turn):
            return (
                "the template writes its text behind the results of its tool calls, where no answer has it; remove the "
                "text, give it as reasoning_content, or give another chat_template"
            )
        earlier = next((place for place, message in enumerate(turn.before) if message.get("tool_calls")), None)
        if turn.message.get("tool_calls") and earlier is not None and self._is_cut(turn):
            return (
                f"the template begins its tool calls otherwise than those of turn {earlier}; give a chat_template that "
                "writes all turns with tool calls alike"
            )
        return "its place in the text of the template is unclear; give a chat_template with {% generation %} marks"

    def _is_text_moved(self, turn: _Turn) -> bool:
        """Return whether results of tools come before the text of a turn that calls them."""
        marked = next(_mark_content(turn.message, before=False), None)
        if marked is None or not read_words(turn.message).strip():
            return False
        alone, shown = turn.show_alone(marked) or "", turn.show(marked) or ""
        return SENTINEL in alone and shown.find(SENTINEL) > alone.find(SENTINEL)

    def _is_cut(self, turn: _Turn) -> bool:
        """Return whether the template writes less before the calls of this turn than before those of a first answer."""
        first = next(place for place, message in enumerate(turn.before) if message["role"] == "assistant")
        marked = turn.message | {"tool_calls": [*map(mark_name, turn.message["tool_calls"])]}
        asked = self._render(turn.before[:first], False) or ""
        begin, found, _ = (self._render([*turn.before[:first], marked], False) or "").partition(SENTINEL)
        shown = (turn.show(marked) or "").partition(SENTINEL)[0]
        return bool(found) and begin.startswith(asked) and not shown.endswith(begin.removeprefix(asked).strip())

    def _find_by_sentinel(self, turn: _Turn, begin: int | None, end: int | None) -> tuple[int | None, int | None]:
        """Return where the answer of a turn begins and ends, of which at least one is not known yet."""
        if SENTINEL in self._text:
            return None, None
        if begin is None and read_reasoning(turn.message):
            if SENTINEL in (turn.show(turn.message | dict.fromkeys(read_reasoning(turn.message), SENTINEL)) or ""):
                # The reasoning comes before the content, and a sentinel in the content cannot locate it.
                return None, None
            turn = self._omit_reasoning(turn)
        call = self._find_call(turn) if turn.message.get("tool_calls") else None
        if turn.message.get("tool_calls") and call is None:
            return None, None
        if begin is None:
            begin = self._find_begin(turn)
            begin = call.begin if begin is None and call is not None else begin
            self.num_by_sentinel += begin is not None
        if end is None:
            end = self._find_end(turn) if call is None else call.end
        # Calls before the content begin at an unknown place.
        return (None, None) if begin is not None and call is not None and call.first < begin else (begin, end)

    def _find_bare(self, turn: _Turn) -> int | None:
        """Return where an answer begins that directly follows the text before it; None for other answers."""
        asked, answered = turn.asked, turn.answered
        if not turn.is_bare or asked is None or answered is None:
            return None
        if not (self._text.startswith(asked) and answered.startswith(asked)):
            return None
        return len(asked) + (len(turn.speaker) if self._text.startswith(turn.speaker, len(asked)) else 0)

    def _omit_reasoning(self, turn: _Turn) -> _Turn:
        """Return a turn without reasoning, which templates may refuse with some contents, if the text is the same."""
        message = {name: value for name, value in turn.message.items() if name not in REASONING}
        messages = [*turn.before, message, *turn.after]
        return _Turn(messages, len(turn.before), self._render) if turn.show(message) == self._text else turn

    def _find_begin(self, turn: _Turn) -> int | None:
        """Return the first character of an answer by a sentinel before its content."""
        for marked in itertools.chain(_mark_content(turn.message, before=True), self._mark_behind_thought(turn)):
            shown = turn.show(marked) or ""
            place = shown.find(SENTINEL)
            is_blank = not read_words(marked).partition(SENTINEL)[2].strip()
            # A template may write blank content differently; the text before it is the same.
            is_same = shown.replace(SENTINEL, "") == self._text or (is_blank and self._text.startswith(shown[:place]))
            if place >= 0 and is_same:
                leads = (turn.find_lead(marked), self._lead)
                return place - next((len(lead) for lead in leads if lead and self._text.endswith(lead, 0, place)), 0)
        return None

    def _mark_behind_thought(self, turn: _Turn) -> Iterator[dict[str, Any]]:
        """Yield messages with a sentinel behind the thought in the content, if the template drops the thought."""
        words = read_words(turn.message)
        thought, rest = split_thought(words)
        if thought and SENTINEL not in (
            turn.show(_with_words(turn.message, words.replace(thought, SENTINEL, 1))) or SENTINEL
        ):
            yield from _mark_content(turn.message, before=True, num_skipped=len(words) - len(rest))

    def _find_end(self, turn: _Turn) -> int | None:
        """Return the end of an answer, including its end-of-turn token, by a sentinel behind its content."""
        for marked in _mark_content(turn.message, before=False):
            shown = turn.show(marked) or ""
            if SENTINEL not in shown or shown.replace(SENTINEL, "") != self._text:
                continue
            place = shown.find(SENTINEL)
            rest = self._strip_end((turn.show_alone(marked) or "").partition(SENTINEL)[2])
            if rest.endswith(self._end_marks) and self._text.startswith(rest, place):
                return place + len(rest)
            return place + next((len(mark) for mark in self._end_marks if self._text.startswith(mark, place)), 0)
        return None

    def _find_call(self, turn: _Turn) -> _CallPlace | None:
        """Return the place of the tool calls by sentinels behind their names; None if it is not found."""
        marked = turn.message | {"tool_calls": [*map(mark_name, turn.message["tool_calls"])]}
        shown, alone = turn.show(marked) or "", turn.show_alone(marked) or ""
        if SENTINEL not in alone or shown.replace(SENTINEL, "") != self._text:
            return None
        # Results of tools may repeat the names.
        *names, rest = alone.split(SENTINEL)
        places = np.cumsum([len(piece) for piece in shown.split(SENTINEL)]).tolist()
        first, last = places[0], places[len(names) - 1]
        lead, rest = turn.find_lead(marked), self._strip_end(rest)
        return _CallPlace(
            begin=first - len(lead) if lead and self._text.endswith(lead, 0, first) else None,
            first=first,
            end=last + len(rest) if self._text.startswith(rest, last) else None,
        )

    def _strip_end(self, text: str) -> str:
        """Return a text without the white space behind its end-of-turn token."""
        bare = text.rstrip()
        return bare if bare.endswith(self._end_marks) else text


class _Turn:
    """One message of a conversation, and the messages around it."""

    def __init__(self, messages: Messages, number: int, render: Render) -> None:
        self.before, self.message, self.after = messages[:number], messages[number], messages[number + 1 :]
        self._render = render

    @functools.cached_property
    def asked(self) -> str | None:
        """The text up to the generation prompt; None if there is none, or the template refuses it."""
        return self._render(self.before, True) if self.before else None

    @functools.cached_property
    def has_prompt(self) -> bool:
        """Whether the template writes a generation prompt."""
        return self.asked is not None and self.asked != self._render(self.before, False)

    @functools.cached_property
    def is_bare(self) -> bool:
        """Whether an answer directly follows the text before it: in Mistral, and behind results of tools in Gemma 4."""
        if self.asked is None or self.has_prompt:
            return False
        plain = _with_words({"role": "assistant", "content": self.message.get("content")}, SENTINEL)
        before, found, _ = (self.show_alone(plain) or "").partition(SENTINEL)
        return bool(found) and before.startswith(self.asked) and not before[len(self.asked) :].strip()

    @functools.cached_property
    def speaker(self) -> str:
        """The generation prompt of the first answer, which names the speaker; "" if the template writes none."""
        first = next((number for number, message in enumerate(self.before) if message["role"] == "assistant"), 0)
        plain = self._render(self.before[:first], False) if first else None
        return "" if plain is None else (self._render(self.before[:first], True) or "").removeprefix(plain)

    @functools.cached_property
    def answered(self) -> str | None:
        """The text up to the end of the turn; None if the template refuses it."""
        return self.show_alone(self.message)

    def show(self, message: dict[str, Any]) -> str | None:
        """Return the text of the conversation with another message in this turn."""
        return self._render([*self.before, message, *self.after], False)

    def show_alone(self, message: dict[str, Any]) -> str | None:
        """Return the text up to the end of the turn with another message in it."""
        return self._render([*self.before, message], False)

    def find_lead(self, message: dict[str, Any]) -> str:
        """Return the text between the prompt and the sentinel in a message, which the model must write too.

        Without a generation prompt only white space counts, because other text names the speaker; unless answers
        directly follow the text before them.
        """
        answered = self.show_alone(message)
        if answered is None or self.asked is None or not answered.startswith(self.asked):
            return ""
        lead, found, _ = answered[len(self.asked) :].partition(SENTINEL)
        if not found or not (self.has_prompt or lead.isspace() or self.is_bare):
            return ""
        return lead if self.has_prompt else lead.removeprefix(self.speaker)


def find_lead(messages: Messages, render: Render) -> str:
    """Return what a template writes between the generation prompt and the sentinel in the last message."""
    return _Turn(messages, len(messages) - 1, render).find_lead(messages[-1])


def mark_name(call: dict[str, Any], mark: str = SENTINEL) -> dict[str, Any]:
    """Return a tool call with a mark behind the name of its function."""
    if "function" in call:
        return call | {"function": mark_name(call["function"], mark)}
    return call | {"name": f"{call.get('name', '')}{mark}"}


def _mark_content(message: dict[str, Any], *, before: bool, num_skipped: int = 0) -> Iterator[dict[str, Any]]:
    """Yield a message with a sentinel at one end of its content: first outside of the white space there, then inside.

    Templates that strip the content show only the second. The first num_skipped characters do not count as content.
    """
    content = message.get("content")
    if content is None or (not isinstance(content, str) and any(part["type"] != "text" for part in content)):
        return
    whole = read_words(message)
    skipped, words = whole[:num_skipped], whole[num_skipped:]
    inner = words.lstrip() if before else words.rstrip()
    for kept in dict.fromkeys((words, inner)):
        begin, rest = words[: len(words) - len(kept)], words[len(kept) :]
        yield _with_words(message, skipped + (begin + SENTINEL + kept if before else kept + SENTINEL + rest))


def _with_words(message: dict[str, Any], words: str) -> dict[str, Any]:
    """Return a message with other content of the same form, text or a list of parts."""
    return message | {"content": as_parts(words) if isinstance(message["content"], list) else words}
