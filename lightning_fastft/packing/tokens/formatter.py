"""Encode rows of one format as token ids with trained flags.

Every format but input_ids is rendered to a text with trained character spans, which is tokenised once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from lightning_fastft.core.errors import DataError, OptionError
from lightning_fastft.packing.document import IGNORED_LABEL
from lightning_fastft.packing.images import ImageExpander, ImageFile, decode_image, place_images, read_image
from lightning_fastft.packing.rows.completion_rows import (
    Texts,
    join_completions,
    join_ids,
    read_completions,
    read_rollout_ids,
    unlike,
)
from lightning_fastft.packing.rows.formats import TUNERS, FormatOptions
from lightning_fastft.packing.rows.messages import check_messages, read_conversation
from lightning_fastft.packing.rows.parsing import check_text
from lightning_fastft.packing.rows.rejects import (
    IMAGE_UNSERVED,
    IMAGE_WITH_COMPLETIONS,
    LABELS_DIFFER,
    WRONG_TYPE,
    RowRejectedError,
)
from lightning_fastft.packing.store.completion_store import Segments
from lightning_fastft.packing.tokens import chat
from lightning_fastft.packing.tokens.control_tokens import Rendered

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_TOKEN_ID = 2**31 - 1


class Encoded(NamedTuple):
    """One example as tokens: ids (int64) and trained flags (bool), both of shape (length,); remarks on its row, its
    images and its completions.
    """

    input_ids: np.ndarray
    is_trained: np.ndarray
    notes: tuple[str, ...] = ()
    images: tuple[ImageFile, ...] = ()
    completions: Segments | None = None


class _Conversations(NamedTuple):
    """The texts of one row, one per completion, and the scores; must_differ: two equal ones are an error."""

    rendered: list[Rendered]
    scores: tuple[float, ...]
    must_differ: bool


class TokenIdError(DataError):
    """Raised for a token id or label outside of the embedding, which would trigger a device assert in training.

    Args:
        token_id: The id.
        what: "token id" or "label".
        allowed: The allowed ids, as text.
    """

    def __init__(self, token_id: int, what: str, allowed: str) -> None:
        super().__init__(f"{what} {token_id} is impossible: {allowed}")
        self.token_id = token_id
        self.what = what
        self.allowed = allowed

    def __reduce__(self) -> tuple[type[TokenIdError], tuple[int, str, str]]:
        return type(self), (self.token_id, self.what, self.allowed)


class Formatter:
    """Encode rows as tokens.

    Args:
        tokenizer: A Hugging Face tokenizer; None supports only input_ids, and rollouts as ids.
        options: Options for turning rows into tokens.
        vocab_size: Rows of the model's embedding; None if it is not known yet.
        images: Expands the image placeholders of a text; None rejects rows with images.

    Raises:
        DataError: The chat template's file cannot be read.

    Example:
        >>> formatter = Formatter(None, options=FormatOptions(max_tokens=8))
        >>> formatter.encode([{"input_ids": [1, 2], "labels": [-100, 2]}], format="input_ids")[0].is_trained
        array([False,  True])
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        *,
        options: FormatOptions,
        vocab_size: int | None = None,
        images: ImageExpander | None = None,
    ) -> None:
        self.notes: Counter[str] = Counter()
        self._images = images
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
            if template is None and images is not None:
                template = images.chat_template
            if template is not None:
                self._chat = chat.ChatRenderer(tokenizer, template=template, loss_on=options.loss_on, notes=self.notes)

    def check_can_serve(self, format: str, *, file: str) -> None:
        """Raise DataError if this tokenizer cannot encode rows of a format, and OptionError if the options cannot."""
        if format not in ("input_ids", "rollouts") and self._tokenizer is None:
            raise _missing_tokenizer(format, file=file)
        for option, refused, allowed in (
            ("loss_on", "all", "'completion'"),
            ("too_long", "split", "'refuse' or 'truncate'"),
        ):
            if format in TUNERS and getattr(self._options, option) == refused:
                raise OptionError(
                    f"{file}: {option}={refused!r} is not possible for rows of format {format!r}, which train "
                    f"completions behind a shared prompt. Allowed is {option}={allowed}."
                )
        if format in ("messages", "conversations") and self._chat is None:
            raise DataError(
                f"{file}: rows of format {format!r} need a chat template, and the tokenizer has none. Give "
                "chat_template."
            )

    def encode(
        self, rows: Sequence[Mapping[str, Any]], *, format: str, folder: str = ""
    ) -> list[Encoded | RowRejectedError | TokenIdError]:
        """Return the tokens of each row, or the error that rejects it.

        Args:
            rows: Columns under the names of the format.
            format: Format of all rows.
            folder: Paths of images are relative to it.

        Cost:
            One tokenizer call for all rows. A chat template is rendered once per row (or completion), and once more per
            turn if it has no generation marks; the prompt is tokenised once per completion. Each image is decoded and
            processed once, for its number of tokens.
        """
        outcomes: list[Encoded | RowRejectedError | TokenIdError | Rendered | _Conversations] = []
        for row in rows:
            try:
                outcomes.append(self._read(row, format=format, folder=folder))
            except (RowRejectedError, TokenIdError) as error:
                outcomes.append(error)
        rendered = [
            one
            for outcome in outcomes
            if isinstance(outcome, (Rendered, _Conversations))
            for one in ([outcome] if isinstance(outcome, Rendered) else outcome.rendered)
        ]
        encoded = iter(self._encode_rendered(rendered))
        finished: list[Encoded | RowRejectedError | TokenIdError] = []
        for outcome in outcomes:
            if isinstance(outcome, Rendered):
                finished.append(next(encoded))
            elif isinstance(outcome, _Conversations):
                finished.append(_join(outcome, [next(encoded) for _ in outcome.rendered]))
            else:
                finished.append(outcome)
        return finished

    def _read(self, row: Mapping[str, Any], *, format: str, folder: str) -> Encoded | Rendered | _Conversations:
        """Return the tokens of a row of ids, and the texts of any other row."""
        if format == "input_ids":
            return self._take_ids(row)
        if format not in TUNERS:
            return self._expand(self._render(row, format=format), folder=folder)
        if _image_column(row):
            raise RowRejectedError(IMAGE_WITH_COMPLETIONS, "they are not supported yet")
        if "prompt_ids" in row and "completion_ids" in row:
            return self._take_rollout_ids(row)
        if self._tokenizer is None:
            raise _missing_tokenizer(format, file="a row of text")
        return self._render_completions(row, format=format)

    def _render_completions(self, row: Mapping[str, Any], *, format: str) -> _Conversations:
        """Return one text per completion, each behind the prompt."""
        found = read_completions(row, format=format)
        tools = row.get("tools")
        if isinstance(found, Texts):
            if tools:
                raise RowRejectedError(WRONG_TYPE, "a prompt with tools must be a list of messages")
            prompt = found.prompt + ("" if found.is_implicit else self._options.separator)
            rendered = [self._render_pair(prompt, completion) for completion in found.completions]
        else:
            rendered = []
            for completion in found.completions:
                turns = found.prompt + completion
                if any(isinstance(message.get("content"), list) for message in turns):
                    raise RowRejectedError(IMAGE_WITH_COMPLETIONS, "they are not supported yet")
                text, _ = self._render_chat(turns, num_context_turns=len(found.prompt), tools=tools, column=[])
                rendered.append(text)
        return _Conversations(rendered, found.scores, must_differ=format == "preference")

    def _expand(self, rendered: tuple[Rendered, list[object]], *, folder: str) -> Rendered:
        """Read the images of a rendered row and expand their placeholders, which are never trained."""
        example, values = rendered
        if not values:
            return example
        assert self._images is not None
        files = [read_image(value, folder=folder) for value in values]
        expanded = self._images.expand(example.text, [decode_image(file) for file in files])
        return example._replace(
            text=expanded.text, spans=move_spans(example.spans, expanded.places), images=tuple(files)
        )

    def _render(self, row: Mapping[str, Any], *, format: str) -> tuple[Rendered, list[object]]:
        """Return the text of a row, and its images in the order of their placeholders."""
        column = _image_column(row)
        if format == "messages":
            return self._render_chat(check_messages(row["messages"]), tools=row.get("tools"), column=column)
        if format == "conversations":
            messages = read_conversation(row["conversations"], system=row.get("system"))
            return self._render_chat(messages, tools=row.get("tools"), column=column)
        if format == "prompt_completion" and not isinstance(row["prompt"], str):
            return self._render_turns(row["prompt"], row["completion"], column=column)
        if column:
            raise RowRejectedError(WRONG_TYPE, "a prompt with images must be a list of messages")
        return self._render_text(row, format=format), []

    def _render_text(self, row: Mapping[str, Any], *, format: str) -> Rendered:
        if format == "prompt_completion":
            return self._render_strings(row["prompt"], row["completion"])
        if format == "instruction":
            prompt = f"### Instruction:\n{check_text(row['instruction'], column='instruction')}\n\n"
            extra = check_text(row.get("input", ""), column="input", may_be_empty=True)
            prompt += f"### Input:\n{extra}\n\n" if extra.strip() else ""
            return self._render_pair(prompt + "### Response:\n", check_text(row["output"], column="output"))
        text = check_text(row["text"], column="text")
        return Rendered(text, ((0, len(text)),))

    def _render_strings(self, prompt: object, completion: object) -> Rendered:
        if not (isinstance(prompt, str) and isinstance(completion, str)):
            raise unlike(prompt, completion, column="completion")
        return self._render_pair(
            check_text(prompt, column="prompt") + self._options.separator, check_text(completion, column="completion")
        )

    def _render_turns(
        self, prompt: object, completion: object, *, column: list[object]
    ) -> tuple[Rendered, list[object]]:
        if not (isinstance(prompt, (list, tuple)) and isinstance(completion, (list, tuple))):
            raise unlike(prompt, completion, column="completion")
        turns = check_messages(prompt, column="prompt", needs_assistant=False)
        answers = check_messages(completion, column="completion")
        return self._render_chat(turns + answers, num_context_turns=len(turns), column=column)

    def _render_pair(self, prompt: str, completion: str) -> Rendered:
        begin = 0 if self._options.loss_on == "all" else len(prompt)
        return Rendered(prompt + completion, ((begin, len(prompt) + len(completion)),))

    def _render_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        num_context_turns: int = 0,
        tools: object = None,
        column: list[object],
    ) -> tuple[Rendered, list[object]]:
        if self._chat is None:
            raise DataError("Messages need a chat template, and the tokenizer has none. Give chat_template.")
        turns, images = place_images(messages, column)
        if images and self._images is None:
            raise RowRejectedError(IMAGE_UNSERVED, "image parts need a vision-language model with its processor")
        return self._chat.render(turns, num_context_turns=num_context_turns, tools=tools), images

    def _encode_rendered(self, rendered: Sequence[Rendered]) -> list[Encoded | TokenIdError]:
        if not rendered:
            return []
        assert self._tokenizer is not None, "call check_can_serve first"
        batch = self._tokenizer(
            [example.text for example in rendered], add_special_tokens=False, return_attention_mask=False, verbose=False
        )
        encoded: list[Encoded | TokenIdError] = []
        for number, example in enumerate(rendered):
            if example.is_quoted:
                ids, spans = self._encode_quoted(example)
            else:
                ids, spans = self._place_spans(batch, number, example, tokenizer=self._tokenizer)
            # A chat template adds its own first and last tokens.
            finished = self._finish(ids, spans, add_ends=not example.is_chat, trains_all=not example.images)
            finished = finished._replace(notes=example.notes, images=example.images)
            highest = int(finished.input_ids.max(initial=-1))
            encoded.append(
                finished if highest <= self._highest_id else TokenIdError(highest, "token id", self._allowed_ids)
            )
        return encoded

    def _encode_quoted(self, example: Rendered) -> tuple[list[int], list[tuple[int, int]]]:
        """Return ids and trained spans of a conversation with control tokens as plain text in user turns."""
        assert self._chat is not None
        controls = self._chat.controls
        batch, marked = controls.encode(example)
        ids, spans = self._place_spans(batch, 0, marked, tokenizer=controls.marked)
        return controls.own_ids(ids), spans

    def _finish(
        self, ids: list[int], spans: list[tuple[int, int]], *, add_ends: bool, trains_all: bool = True
    ) -> Encoded:
        """Set the trained flags; add the tokenizer's prefix and a trained end-of-sequence token.

        trains_all: Whether loss_on="all" may train every token, also those outside of the spans.
        """
        if not ids:
            return Encoded(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=bool))
        prefix = self._prefix_ids if add_ends and ids[: len(self._prefix_ids)] != self._prefix_ids else []
        suffix = [self._eos_id] if add_ends and self._eos_id is not None and ids[-1] != self._eos_id else []
        input_ids = np.asarray(prefix + ids + suffix, dtype=np.int64)
        is_trained = np.zeros(len(input_ids), dtype=bool)
        if self._options.loss_on == "all" and trains_all:
            is_trained[:] = True
        for begin, end in spans:
            is_trained[len(prefix) + begin : len(prefix) + end] = True
        if suffix:
            is_trained[-1] = True
        if not add_ends and spans and int(input_ids[len(prefix) + spans[-1][1] - 1]) not in self._special_ids():
            self.notes[
                "conversations whose last trained token is not a special token: the model may not learn to stop there"
            ] += 1
        return Encoded(input_ids, is_trained)

    def _special_ids(self) -> frozenset[int]:
        return self._chat.special_ids if self._chat is not None else frozenset()

    def _place_spans(
        self,
        batch: Any,
        number: int,
        example: Rendered,
        *,
        tokenizer: PreTrainedTokenizerBase,
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Return ids and trained token spans; if a token crosses a span border, tokenise both sides separately.

        At inference the prompt is tokenised alone, so a token across the border would never occur.
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
            self.notes["examples tokenised in parts, because a token crossed from context into trained text"] += 1
            place = dict(zip(cuts, np.cumsum([0, *map(len, pieces)]).tolist()))
            return joined, [(place[begin], place[end]) for begin, end in example.spans]
        # This tokenizer adds a prefix to each text, so parts do not add up to the whole. Keep the crossing token as
        # context.
        self.notes["examples with a token across the border of trained text, which is not trained"] += 1
        return ids, [(found[begin][0], found[end][0]) for begin, end in example.spans]

    def _find_border_fast(self, batch: Any, number: int, text: str, border: int, ids: list[int]) -> tuple[int, bool]:
        """Return the first token that begins at or after a border, and whether no token crosses the border."""
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
        # White space that a tokenizer omits from its offsets appears as a gap before the border.
        return token, token == 0 or batch.token_to_chars(number, token - 1).end == border

    def _find_border_slow(self, batch: Any, number: int, text: str, border: int, ids: list[int]) -> tuple[int, bool]:
        """Find the border by tokenising the text before it; no token crosses it if those ids are a prefix of all."""
        assert self._tokenizer is not None
        if border >= len(text):
            return len(ids), True
        before = self._tokenizer(text[:border], add_special_tokens=False, return_attention_mask=False, verbose=False)[
            "input_ids"
        ]
        return len(before), ids[: len(before)] == list(before)

    def _take_ids(self, row: Mapping[str, Any]) -> Encoded:
        ids = self._take_token_ids(row["input_ids"], column="input_ids")
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
                f"position {place} has label {int(labels[place])} and id {int(ids[place])}; labels must be unshifted "
                "ids or -100",
            )
        return Encoded(ids, is_trained if self._options.loss_on == "completion" else np.ones(len(ids), dtype=bool))

    def _take_rollout_ids(self, row: Mapping[str, Any]) -> Encoded:
        completions, scores, log_probs = read_rollout_ids(row)
        ids, is_trained, joined = join_ids(
            self._take_token_ids(row["prompt_ids"], column="prompt_ids"),
            [
                self._take_token_ids(value, column=f"completion_ids[{number}]")
                for number, value in enumerate(completions)
            ],
            scores=scores,
            log_probs=log_probs,
        )
        return Encoded(ids, is_trained, completions=joined)

    def _take_token_ids(self, value: object, *, column: str) -> np.ndarray:
        ids = self._to_array(value, column=column)
        if ids.size and (ids.min() < 0 or ids.max() > self._highest_id):
            raise TokenIdError(int(ids.min() if ids.min() < 0 else ids.max()), "token id", self._allowed_ids)
        return ids

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
            raise RowRejectedError(WRONG_TYPE, f"{column} must be a list of integers")
        try:
            return np.asarray(value, dtype=np.int64)
        except OverflowError:
            raise TokenIdError(max(value, key=abs), column, self._allowed_ids) from None


def _image_column(row: Mapping[str, Any]) -> list[object]:
    """Return the images of a row's columns, images before image."""
    images = row.get("images")
    several = list(images) if isinstance(images, (list, tuple)) else [] if images is None else [images]
    return several + ([row["image"]] if row.get("image") is not None else [])


def _missing_tokenizer(format: str, *, file: str) -> DataError:
    return DataError(
        f"{file}: rows of format {format!r} need a tokenizer, and there is none. Give tokenizer, or save the "
        "tokenizer's files in the folder of the model."
    )


def _join(
    conversations: _Conversations, encoded: Sequence[Encoded | TokenIdError]
) -> Encoded | RowRejectedError | TokenIdError:
    """Return the conversations of one row as one example, with their prompt once."""
    parts = []
    for part in encoded:
        if isinstance(part, TokenIdError):
            return part
        parts.append(part)
    try:
        ids, is_trained, completions = join_completions(
            [part.input_ids for part in parts],
            [part.is_trained for part in parts],
            scores=conversations.scores,
            must_differ=conversations.must_differ,
        )
    except RowRejectedError as error:
        return error
    notes = tuple(dict.fromkeys(note for part in parts for note in part.notes))
    return Encoded(ids, is_trained, notes, completions=completions)


def move_spans(
    spans: Sequence[tuple[int, int]], places: Sequence[tuple[int, int, int, int]]
) -> tuple[tuple[int, int], ...]:
    """Return character spans in a text whose placeholders were expanded; the expanded ones are in no span.

    Args:
        spans: Spans in the old text, ascending.
        places: For each placeholder its (begin, end) in the old text, then in the new one.

    Example:
        >>> move_spans([(0, 6)], [(2, 3, 2, 5)])
        ((0, 2), (5, 8))
    """
    moved = []
    for begin, end in spans:
        shift = 0
        for old_begin, old_end, new_begin, new_end in places:
            if old_end <= begin:
                shift = new_end - old_end
            elif old_begin < end:
                if begin < old_begin:
                    moved.append((begin + shift, new_begin))
                begin, shift = old_end, new_end - old_end
        if begin < end:
            moved.append((begin + shift, end + shift))
    return tuple(moved)


def _decode(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _find_prefix(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens that a tokenizer adds before a text, such as a beginning-of-sequence token."""
    plain = list(tokenizer("a", add_special_tokens=False)["input_ids"])
    whole = list(tokenizer("a", add_special_tokens=True)["input_ids"])
    for begin in range(len(whole) - len(plain) + 1):
        if whole[begin : begin + len(plain)] == plain:
            return whole[:begin]
    return []
