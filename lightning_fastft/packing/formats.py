"""Formats of examples: which columns a row has, the text they become, and which of its tokens are trained.

Every format but input_ids becomes one text with trained spans of characters; tokens follow from the text once, at the
end.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from lightning_fastft.core.checks import check_bool, check_choice, check_int, check_string
from lightning_fastft.core.errors import DataError, OptionError
from lightning_fastft.packing import chat
from lightning_fastft.packing.context import IGNORED_LABEL
from lightning_fastft.packing.rows import (
    LABELS_DIFFER,
    WRONG_TYPE,
    RowRejectedError,
    check_messages,
    check_text,
    read_conversation,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Required and optional columns of each format, in the order in which a row is asked for them.
COLUMNS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "messages": (("messages",), ("tools",)),
    "conversations": (("conversations",), ("system", "tools")),
    "prompt_completion": (("prompt", "completion"), ()),
    "instruction": (("instruction", "output"), ("input",)),
    "input_ids": (("input_ids",), ("labels",)),
    "text": (("text",), ()),
}
MAX_TOKEN_ID = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class FormatOptions:
    """How rows become tokens.

    Args:
        max_tokens: Longest example in tokens: the length of a pack.
        format: "messages", "conversations", "prompt_completion", "instruction", "text", "input_ids", or "auto" to go by
            the columns of each file.
        columns: Our column names to those of the data, for example {"prompt": "question", "completion": "answer"}.
        loss_on: "completion" trains assistant turns, completions and outputs; "all" trains every token.
        chat_template: Jinja text, or a file that ends in .jinja, in place of the tokenizer's own template.
        add_eos: Whether the end-of-sequence token is appended, and trained, in every format but messages, conversations
            and input_ids.
        too_long: What happens to an example of more than max_tokens: "refuse" stops before training, "truncate" keeps
            its beginning if a trained token is left there and rejects it otherwise, "split" makes several examples of
            it. Always counted.
        separator: Put between a prompt and a completion that are strings.
        extra_columns: "refuse" rejects a row with a column that the rows of its file do not have (the file's first 100
            rows tell), "ignore" takes it.

    Raises:
        OptionError: An option is outside of what is allowed.
    """

    max_tokens: int
    format: str = "auto"
    columns: Mapping[str, str] | None = None
    loss_on: str = "completion"
    chat_template: str | None = None
    add_eos: bool = True
    too_long: str = "refuse"
    separator: str = ""
    extra_columns: str = "refuse"

    def __post_init__(self) -> None:
        # Offsets of documents in a pack are 32-bit integers.
        check_int("max_tokens", self.max_tokens, low=2, high=2**31 - 1)
        check_bool("add_eos", self.add_eos)
        check_string("separator", self.separator, may_be_empty=True)
        if self.chat_template is not None:
            check_string("chat_template", self.chat_template)
        if self.columns is not None and not isinstance(self.columns, Mapping):
            raise OptionError(
                f"columns must map our column names to those of the data, got {self.columns!r} "
                f"({type(self.columns).__name__})."
            )
        check_choice("format", self.format, ("auto", *COLUMNS))
        check_choice("loss_on", self.loss_on, ("completion", "all"))
        check_choice("too_long", self.too_long, ("refuse", "truncate", "split"))
        check_choice("extra_columns", self.extra_columns, ("refuse", "ignore"))
        known = {name for required, optional in COLUMNS.values() for name in required + optional}
        for name in self.columns or {}:
            if name not in known:
                raise OptionError(
                    f"columns maps {name!r}, which no format has; our names are {', '.join(sorted(known))}."
                )
            check_string(f"columns[{name!r}]", (self.columns or {})[name])


class Encoded(NamedTuple):
    """One example as tokens: ids (int64) and which of them are trained (bool), both of shape (length,), and what
    to note about its row.
    """

    input_ids: np.ndarray
    is_trained: np.ndarray
    notes: tuple[str, ...] = ()


class TokenIdError(DataError):
    """A row names a token id or label that no embedding can have: training would end in a device assert.

    Args:
        token_id: The id.
        what: "token id" or "label".
        allowed: What an id may be.
    """

    def __init__(self, token_id: int, what: str, allowed: str) -> None:
        super().__init__(f"{what} {token_id} is impossible: {allowed}")
        self.token_id = token_id
        self.what = what
        self.allowed = allowed

    def __reduce__(self) -> tuple[type[TokenIdError], tuple[int, str, str]]:
        return type(self), (self.token_id, self.what, self.allowed)


def detect_format(columns: Sequence[str] | frozenset[str], *, options: FormatOptions) -> str | None:
    """Return the format whose columns are all there, None where there is none.

    Args:
        columns: Column names of a row or a file, under the user's names.
        options: A forced format is returned as it is; a column mapping is applied.

    Example:
        >>> detect_format(["question", "answer"], options=FormatOptions(max_tokens=8, columns={"prompt": "question", "completion": "answer"}))
        'prompt_completion'
    """
    if options.format != "auto":
        return options.format
    mapping = options.columns or {}
    for name, (required, _) in COLUMNS.items():
        if all(mapping.get(column, column) in columns for column in required):
            return name
    return None


def find_wrong_mapping(columns: Sequence[str] | frozenset[str], *, options: FormatOptions) -> str:
    """Return which mapped columns the rows do not have, and what was probably meant; "" where the mapping fits.

    A mapping may serve sources of several formats, so a format is judged where the rows have some of its mapped
    columns, or are of no format.

    Args:
        columns: Column names of the rows, under the user's names.
        options: The column mapping; with ``extra_columns="ignore"`` optional columns may come later than the first
            rows.
    """
    mapping = options.columns or {}
    is_unknown = detect_format(columns, options=options) is None
    for required, optional in COLUMNS.values():
        names = required if options.extra_columns == "ignore" else required + optional
        mapped = [name for name in names if name in mapping]
        absent = [name for name in mapped if mapping[name] not in columns]
        if absent and (is_unknown or len(absent) < len(mapped)):
            near = difflib.get_close_matches(mapping[absent[0]], columns, n=1)
            meant = f"; did you mean {near[0]!r}?" if near else "."
            wrong = ", ".join(f"{name} to {mapping[name]!r}" for name in absent)
            return (
                f"columns maps {wrong}, which the rows do not have{meant} Their columns are "
                f"{', '.join(sorted(columns))}."
            )
    return ""


class Formatter:
    """Turn rows of one format into tokens.

    Args:
        tokenizer: A Hugging Face tokenizer; None serves the format input_ids alone.
        options: How rows become tokens.
        vocab_size: Rows of the model's embedding; None where it is not known yet.

    Raises:
        DataError: The chat template's file cannot be read.

    Example:
        >>> formatter = Formatter(None, options=FormatOptions(max_tokens=8))
        >>> formatter.encode([{"input_ids": [1, 2], "labels": [-100, 2]}], format="input_ids")[0].is_trained
        array([False,  True])
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase | None, *, options: FormatOptions, vocab_size: int | None = None
    ) -> None:
        self.notes: Counter[str] = Counter()
        self._tokenizer = tokenizer
        self._options = options
        self._vocab_size = vocab_size
        self._chat: chat.ChatRenderer | None = None
        self._prefix_ids: list[int] = []
        self._eos_id: int | None = None
        if tokenizer is not None:
            self._prefix_ids = _find_prefix(tokenizer)
            self._eos_id = tokenizer.eos_token_id if options.add_eos else None
            template = chat.read_template(tokenizer, options.chat_template)
            if template is not None:
                self._chat = chat.ChatRenderer(tokenizer, template=template, loss_on=options.loss_on, notes=self.notes)

    def check_can_serve(self, format: str, *, file: str) -> None:
        """Raise DataError if rows of this format cannot be served with this tokenizer."""
        if format != "input_ids" and self._tokenizer is None:
            raise DataError(f"{file}: rows of format {format!r} need a tokenizer, none was given.")
        if format in ("messages", "conversations") and self._chat is None:
            raise DataError(
                f"{file}: rows of format {format!r} need a chat template and the tokenizer has none; give "
                "chat_template."
            )

    def encode(
        self, rows: Sequence[Mapping[str, Any]], *, format: str
    ) -> list[Encoded | RowRejectedError | TokenIdError]:
        """Return for each row its tokens, or why it has none.

        Args:
            rows: Columns under our names.
            format: Format of all of them.

        Cost:
            One call of the tokenizer for all rows; rendering a chat template is a Python call per row (one more per
            turn without generation marks).
        """
        outcomes: list[Encoded | RowRejectedError | TokenIdError | chat.Rendered] = []
        for row in rows:
            try:
                outcomes.append(self._take_ids(row) if format == "input_ids" else self._render(row, format=format))
            except (RowRejectedError, TokenIdError) as error:
                outcomes.append(error)
        rendered = [outcome for outcome in outcomes if isinstance(outcome, chat.Rendered)]
        encoded = iter(self._encode_rendered(rendered))
        return [next(encoded) if isinstance(outcome, chat.Rendered) else outcome for outcome in outcomes]

    def _render(self, row: Mapping[str, Any], *, format: str) -> chat.Rendered:
        if format == "messages":
            return self._render_chat(check_messages(row["messages"]), tools=row.get("tools"))
        if format == "conversations":
            return self._render_chat(
                read_conversation(row["conversations"], system=row.get("system")), tools=row.get("tools")
            )
        if format == "prompt_completion":
            return self._render_prompt(row["prompt"], row["completion"])
        if format == "instruction":
            prompt = f"### Instruction:\n{check_text(row['instruction'], column='instruction')}\n\n"
            extra = check_text(row.get("input", ""), column="input", may_be_empty=True)
            prompt += f"### Input:\n{extra}\n\n" if extra.strip() else ""
            return self._render_pair(prompt + "### Response:\n", check_text(row["output"], column="output"))
        text = check_text(row["text"], column="text")
        return chat.Rendered(text, ((0, len(text)),))

    def _render_prompt(self, prompt: object, completion: object) -> chat.Rendered:
        if isinstance(prompt, str) and isinstance(completion, str):
            return self._render_pair(
                check_text(prompt, column="prompt") + self._options.separator,
                check_text(completion, column="completion"),
            )
        if isinstance(prompt, (list, tuple)) and isinstance(completion, (list, tuple)):
            turns = check_messages(prompt, column="prompt", needs_assistant=False)
            answers = check_messages(completion, column="completion")
            return self._render_chat(turns + answers, num_context_turns=len(turns))
        found = f"{type(prompt).__name__} and {type(completion).__name__}"
        raise RowRejectedError(
            WRONG_TYPE, f"prompt and completion must both be strings or both lists of messages, they are {found}"
        )

    def _render_pair(self, prompt: str, completion: str) -> chat.Rendered:
        begin = 0 if self._options.loss_on == "all" else len(prompt)
        return chat.Rendered(prompt + completion, ((begin, len(prompt) + len(completion)),))

    def _render_chat(
        self, messages: list[dict[str, Any]], *, num_context_turns: int = 0, tools: object = None
    ) -> chat.Rendered:
        if self._chat is None:
            raise DataError("Messages need a chat template and the tokenizer has none; give chat_template.")
        return self._chat.render(messages, num_context_turns=num_context_turns, tools=tools)

    def _encode_rendered(self, rendered: Sequence[chat.Rendered]) -> list[Encoded | TokenIdError]:
        if not rendered:
            return []
        assert self._tokenizer is not None, "check_can_serve comes first"
        batch = self._tokenizer(
            [example.text for example in rendered], add_special_tokens=False, return_attention_mask=False, verbose=False
        )
        encoded: list[Encoded | TokenIdError] = []
        for number, example in enumerate(rendered):
            if example.is_quoted:
                ids, spans = self._encode_quoted(example)
            else:
                ids, spans = self._place_spans(batch, number, example, tokenizer=self._tokenizer)
            # A chat template writes its own first and last tokens.
            finished = self._finish(ids, spans, add_ends=not example.is_chat)._replace(notes=example.notes)
            highest = int(finished.input_ids.max(initial=-1))
            encoded.append(
                finished if highest <= self._highest_id else TokenIdError(highest, "token id", self._allowed_ids)
            )
        return encoded

    def _encode_quoted(self, example: chat.Rendered) -> tuple[list[int], list[tuple[int, int]]]:
        """Return ids and trained spans of a conversation whose questions hold control tokens as plain text."""
        assert self._chat is not None
        controls = self._chat.controls
        batch, marked = controls.encode(example)
        ids, spans = self._place_spans(batch, 0, marked, tokenizer=controls.marked)
        return controls.own_ids(ids), spans

    def _finish(self, ids: list[int], spans: list[tuple[int, int]], *, add_ends: bool) -> Encoded:
        """Mark trained tokens; put the tokenizer's first token in front and the end of the sequence, trained,
        behind.
        """
        if not ids:
            return Encoded(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=bool))
        prefix = self._prefix_ids if add_ends and ids[: len(self._prefix_ids)] != self._prefix_ids else []
        suffix = [self._eos_id] if add_ends and self._eos_id is not None and ids[-1] != self._eos_id else []
        input_ids = np.asarray(prefix + ids + suffix, dtype=np.int64)
        is_trained = np.zeros(len(input_ids), dtype=bool)
        if self._options.loss_on == "all":
            is_trained[:] = True
        for begin, end in spans:
            is_trained[len(prefix) + begin : len(prefix) + end] = True
        if suffix:
            is_trained[-1] = True
        if not add_ends and spans and int(input_ids[len(prefix) + spans[-1][1] - 1]) not in self._special_ids():
            self.notes[
                "conversations whose last trained token is no special token: the model may not learn to stop there"
            ] += 1
        return Encoded(input_ids, is_trained)

    def _special_ids(self) -> frozenset[int]:
        return self._chat.special_ids if self._chat is not None else frozenset()

    def _place_spans(
        self,
        batch: Any,
        number: int,
        example: chat.Rendered,
        *,
        tokenizer: PreTrainedTokenizerBase,
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Return ids and trained spans of tokens; where a token crosses the border of a span, the sides are tokenised
        apart.

        A model is asked with a prompt that was tokenised alone, so a token across the border would be one it never
        meets.
        """
        ids = list(batch["input_ids"][number])
        borders = sorted({border for span in example.spans for border in span})
        find = self._find_border_fast if tokenizer.is_fast else self._find_border_slow
        found = {border: find(batch, number, example.text, border, ids) for border in borders}
        if all(is_clean for _, is_clean in found.values()):
            return ids, [(found[begin][0], found[end][0]) for begin, end in example.spans]
        cuts = [0, *(border for border in borders if 0 < border < len(example.text)), len(example.text)]
        pieces = tokenizer(
            [example.text[begin:end] for begin, end in pairwise(cuts)],
            add_special_tokens=False,
            return_attention_mask=False,
            verbose=False,
        )["input_ids"]
        joined = [token for piece in pieces for token in piece]
        if _decode(tokenizer, joined) == _decode(tokenizer, ids):
            self.notes[
                "examples tokenised in parts, because a token would have crossed from context into trained text"
            ] += 1
            place = dict(zip(cuts, np.cumsum([0, *map(len, pieces)]).tolist()))
            return joined, [(place[begin], place[end]) for begin, end in example.spans]
        # Parts of this tokenizer do not add up to the whole (it puts a mark in front of each text): the crossing token
        # stays context.
        self.notes["examples with a token across the border of trained text, which is left untrained"] += 1
        return ids, [(found[begin][0], found[end][0]) for begin, end in example.spans]

    def _find_border_fast(self, batch: Any, number: int, text: str, border: int, ids: list[int]) -> tuple[int, bool]:
        """Return the first token that begins at or behind a border, and whether no token crosses it."""
        if border == 0:
            return 0, True
        if border >= len(text):
            return len(ids), True
        for character in range(border, len(text)):
            token = batch.char_to_token(number, character)
            if token is not None:
                break
        else:
            token = len(ids)
        if token < len(ids) and batch.token_to_chars(number, token).start < border:
            return token + 1, False
        # White space that a tokenizer leaves out of its offsets shows as a gap in front of the border.
        return token, token == 0 or batch.token_to_chars(number, token - 1).end == border

    def _find_border_slow(self, batch: Any, number: int, text: str, border: int, ids: list[int]) -> tuple[int, bool]:
        """Find the border by tokenising what stands before it: clean if that is how the whole begins."""
        assert self._tokenizer is not None
        if border >= len(text):
            return len(ids), True
        before = self._tokenizer(text[:border], add_special_tokens=False, return_attention_mask=False, verbose=False)[
            "input_ids"
        ]
        return len(before), ids[: len(before)] == list(before)

    def _take_ids(self, row: Mapping[str, Any]) -> Encoded:
        ids = self._to_array(row["input_ids"], column="input_ids")
        if ids.size and (ids.min() < 0 or ids.max() > self._highest_id):
            raise TokenIdError(int(ids.min() if ids.min() < 0 else ids.max()), "token id", self._allowed_ids)
        if row.get("labels") is None:
            return Encoded(ids, np.ones(len(ids), dtype=bool))
        labels = self._to_array(row["labels"], column="labels")
        is_trained = labels != IGNORED_LABEL
        named = labels[is_trained]
        if named.size and (named.min() < 0 or named.max() > self._highest_id):
            raise TokenIdError(
                int(named.min() if named.min() < 0 else named.max()), "label", f"{self._allowed_ids} or {IGNORED_LABEL}"
            )
        if len(labels) != len(ids):
            raise RowRejectedError(LABELS_DIFFER, f"{len(ids)} input_ids and {len(labels)} labels")
        if (named != ids[is_trained]).any():
            place = int(np.flatnonzero(is_trained & (labels != ids))[0])
            raise RowRejectedError(
                LABELS_DIFFER,
                f"label {int(labels[place])} stands at id {int(ids[place])}, position {place}; labels are unshifted "
                "ids or -100",
            )
        return Encoded(ids, is_trained if self._options.loss_on == "completion" else np.ones(len(ids), dtype=bool))

    @property
    def _highest_id(self) -> int:
        return MAX_TOKEN_ID if self._vocab_size is None else self._vocab_size - 1

    @property
    def _allowed_ids(self) -> str:
        return f"ids are 0 to {self._highest_id}" + (
            "" if self._vocab_size is None else f", the embedding has {self._vocab_size} rows"
        )

    def _to_array(self, value: object, *, column: str) -> np.ndarray:
        if isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype.kind in "iu":
            return value.astype(np.int64)
        if not isinstance(value, (list, tuple)) or not all(type(entry) is int for entry in value):
            raise RowRejectedError(WRONG_TYPE, f"{column} must be a list of whole numbers")
        try:
            return np.asarray(value, dtype=np.int64)
        except OverflowError:
            raise TokenIdError(max(value, key=abs), column, self._allowed_ids) from None


def _decode(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _find_prefix(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens that this tokenizer puts in front of a text, such as a beginning-of-sequence token."""
    plain = list(tokenizer("a", add_special_tokens=False)["input_ids"])
    whole = list(tokenizer("a", add_special_tokens=True)["input_ids"])
    for begin in range(len(whole) - len(plain) + 1):
        if whole[begin : begin + len(plain)] == plain:
            return whole[:begin]
    return []
