"""Encode rows of one format as token ids with trained flags.

Every format but input_ids is rendered to a text with trained character spans, which is tokenised once.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from lightning_fastft.core.errors import DataError, OptionError
from lightning_fastft.packing.images import decode_image, image_column, place_images, read_image
from lightning_fastft.packing.rows.completion_rows import join_completions, read_completions, unlike
from lightning_fastft.packing.rows.formats import TUNERS, FormatOptions
from lightning_fastft.packing.rows.messages import check_messages, read_conversation
from lightning_fastft.packing.rows.parsing import check_text
from lightning_fastft.packing.rows.rejects import IMAGE_UNSERVED, IMAGE_WITH_COMPLETIONS, WRONG_TYPE, RowRejectedError
from lightning_fastft.packing.rows.steps import join_steps, read_steps
from lightning_fastft.packing.rows.template_options import OPTIONS, check_template_reads, read_template_options
from lightning_fastft.packing.tokens import chat
from lightning_fastft.packing.tokens.control_tokens import Rendered
from lightning_fastft.packing.tokens.spans import find_repeated_prompt, move_spans, place_spans
from lightning_fastft.packing.tokens.token_ids import (
    Encoded,
    TokenIdError,
    encode_ids,
    encode_rollout_ids,
    find_prefix,
    highest_id,
    impossible_id,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from lightning_fastft.hf.images import ImageEncoder


# Note on rows that fastft chat continues with --plain.
PLAIN_TEXT = "rows of plain text, to which the chat template is not applied"


class _RowTexts(NamedTuple):
    """The texts of one row, and the function that joins their tokens to one example."""

    rendered: list[Rendered]
    join: Callable[[list[Encoded]], Encoded]


class Formatter:
    """Encode rows as tokens.

    Args:
        tokenizer: A Hugging Face tokenizer; None supports only input_ids, and rollouts as ids.
        options: Options for turning rows into tokens.
        vocab_size: Rows of the model's embedding; None if it is not known yet.
        images: Expands the image placeholders of a text; None rejects rows with images.
        stop_ids: Ids of tokens at which generation stops besides the tokenizer's end-of-sequence token; None for a
            model that does not generate. Answers that a chat template ends without a token get one of them.

    Raises:
        DataError: The chat template's file cannot be read.
        OptionError: The chat template does not read one of chat_template_kwargs.

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
        images: ImageEncoder | None = None,
        stop_ids: Sequence[int] | None = (),
    ) -> None:
        self.notes: Counter[str] = Counter()
        self._images = images
        self._tokenizer = tokenizer
        self._options = options
        self._vocab_size = vocab_size
        self._chat: chat.ChatRenderer | None = None
        self._prefix_ids = [] if tokenizer is None else find_prefix(tokenizer)
        self._eos_id = tokenizer.eos_token_id if tokenizer is not None and options.add_eos else None
        if tokenizer is not None:
            template = chat.read_template(tokenizer, options.chat_template)
            if template is None and images is not None:
                template = images.chat_template
            variables = check_template_reads(options.chat_template_kwargs, template=template)
            if template is not None:
                self._chat = chat.ChatRenderer(
                    tokenizer,
                    template=template,
                    loss_on=options.loss_on,
                    notes=self.notes,
                    stop_ids=stop_ids if options.add_eos else None,
                    options=variables,
                )

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

        Cost:
            One tokenizer call for all rows. A chat template is rendered once per row (or completion), and once more per
            turn if it has no generation marks; the prompt is tokenised once per completion. Each image is decoded and
            processed once, for its number of tokens.
        """
        outcomes: list[Encoded | RowRejectedError | TokenIdError | _RowTexts] = []
        for row in rows:
            try:
                outcomes.append(self._read(row, format=format, folder=folder))
            except (RowRejectedError, TokenIdError) as error:
                outcomes.append(error)
        rendered = [text for outcome in outcomes if isinstance(outcome, _RowTexts) for text in outcome.rendered]
        encoded = iter(self._encode_rendered(rendered))
        return [_join(outcome, encoded) if isinstance(outcome, _RowTexts) else outcome for outcome in outcomes]

    def encode_prompt(
        self, prompt: str | list[dict[str, Any]], *, tools: object = None, template_options: object = None
    ) -> list[int]:
        """Return the tokens of a text or of checked messages, up to where a completion begins.

        template_options are those of the column chat_template_kwargs.

        Raises:
            RowRejectedError: The prompt cannot be rendered.
            TokenIdError: A token is outside of the embedding.
        """
        if isinstance(prompt, str):
            _refuse_chat_columns(tools, template_options)
            rendered = Rendered(prompt, (), is_chat=True)
        else:
            _refuse_images(prompt)
            rendered = self._find_chat(template_options).render_prompt(prompt, tools=tools)
        (found,) = self._encode_rendered([rendered])
        if isinstance(found, TokenIdError):
            raise found
        ids: list[int] = found.input_ids.tolist()
        has_prefix = not isinstance(prompt, str) or ids[: len(self._prefix_ids)] == self._prefix_ids
        return ids if has_prefix else self._prefix_ids + ids

    def _read(self, row: Mapping[str, Any], *, format: str, folder: str) -> Encoded | _RowTexts:
        """Return the tokens of a row of ids, and the texts of any other row."""
        if format == "input_ids":
            return encode_ids(row, vocab_size=self._vocab_size, loss_on=self._options.loss_on)
        if format not in TUNERS:
            text = self._expand(self._render(row, format=format), folder=folder)
            return _RowTexts([text], operator.itemgetter(0))
        if image_column(row):
            raise RowRejectedError(IMAGE_WITH_COMPLETIONS, "they are not supported yet")
        if "prompt_ids" in row and "completion_ids" in row:
            return encode_rollout_ids(row, vocab_size=self._vocab_size)
        if self._tokenizer is None:
            raise _missing_tokenizer(format, file="a row of text")
        return self._render_steps(row) if format == "stepwise" else self._render_completions(row, format=format)

    def _render_steps(self, row: Mapping[str, Any]) -> _RowTexts:
        """Return prompt and steps as texts of their own, so that the tokens of a step depend on no other one."""
        found = read_steps(row)
        texts = [found.prompt + self._options.separator, *found.completions]
        # As part of a chat, no text gets tokens at its ends.
        return _RowTexts(
            [Rendered(text, (), is_chat=True) for text in texts], partial(self._join_steps, labels=found.scores)
        )

    def _join_steps(self, parts: Sequence[Encoded], *, labels: tuple[float, ...]) -> Encoded:
        """Return a row of steps as one example, with the separator behind each step."""
        assert self._tokenizer is not None
        separator = self._tokenizer(self._options.step_separator, add_special_tokens=False, verbose=False)["input_ids"]
        prompt, *steps = (part.input_ids for part in parts)
        ids, is_trained, completions = join_steps(
            np.concatenate([np.asarray(self._prefix_ids, dtype=np.int64), prompt]),
            [np.concatenate([step, np.asarray(separator, dtype=np.int64)]) for step in steps],
            labels=labels,
        )
        return Encoded(ids, is_trained, completions=completions)

    def _render_completions(self, row: Mapping[str, Any], *, format: str) -> _RowTexts:
        """Return one text per completion, each behind the prompt."""
        found = read_completions(row, format=format)
        if isinstance(found.prompt, str):
            _refuse_chat_columns(row.get("tools"), row.get(OPTIONS))
            if self._chat is not None:
                self.notes[PLAIN_TEXT] += 1
            prompt = found.prompt + ("" if found.is_implicit else self._options.separator)
            rendered = [self._render_pair(prompt, completion) for completion in found.completions]
        else:
            rendered = []
            for completion in found.completions:
                turns = found.prompt + completion
                _refuse_images(turns)
                text, _ = self._render_chat(turns, row, num_context_turns=len(found.prompt))
                rendered.append(text)
        return _RowTexts(rendered, partial(_join_completions, scores=found.scores, must_differ=format == "preference"))

    def _expand(self, rendered: tuple[Rendered, list[object]], *, folder: str) -> Rendered:
        """Read the images of a rendered row and expand their placeholders, which are never trained."""
        example, values = rendered
        if not values:
            return example
        assert self._images is not None
        files = [read_image(value, folder=folder) for value in values]
        text, places = self._images.expand(example.text, [decode_image(file) for file in files])
        return example._replace(text=text, spans=move_spans(example.spans, places), images=tuple(files))

    def _render(self, row: Mapping[str, Any], *, format: str) -> tuple[Rendered, list[object]]:
        """Return the text of a row, and its images in the order of their placeholders."""
        if format == "messages":
            return self._render_chat(check_messages(row["messages"]), row)
        if format == "conversations":
            messages = read_conversation(row["conversations"], system=row.get("system"))
            return self._render_chat(messages, row)
        if format == "prompt_completion" and not isinstance(row["prompt"], str):
            return self._render_turns(row["prompt"], row["completion"], row)
        if image_column(row):
            raise RowRejectedError(WRONG_TYPE, "a prompt with images must be a list of messages")
        _refuse_chat_columns(row.get("tools"), row.get(OPTIONS))
        return self._render_text(row, format=format), []

    def _render_text(self, row: Mapping[str, Any], *, format: str) -> Rendered:
        if self._chat is not None and format in ("prompt_completion", "text"):
            self.notes[PLAIN_TEXT] += 1
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
        self, prompt: object, completion: object, row: Mapping[str, Any]
    ) -> tuple[Rendered, list[object]]:
        if not (isinstance(prompt, (list, tuple)) and isinstance(completion, (list, tuple))):
            raise unlike(prompt, completion, column="completion")
        turns = check_messages(prompt, column="prompt", needs_assistant=False)
        answers = check_messages(completion, column="completion")
        return self._render_chat(turns + answers, row, num_context_turns=len(turns))

    def _render_pair(self, prompt: str, completion: str) -> Rendered:
        begin = 0 if self._options.loss_on == "all" else len(prompt)
        spans = ((begin, len(prompt) + len(completion)),)
        return Rendered(prompt + completion, spans, notes=find_repeated_prompt(prompt, completion))

    def _render_chat(
        self, messages: list[dict[str, Any]], row: Mapping[str, Any], *, num_context_turns: int = 0
    ) -> tuple[Rendered, list[object]]:
        """Return the text of messages with the tools and template options of their row, and their images."""
        renderer = self._find_chat(row.get(OPTIONS))
        turns, images = place_images(messages, image_column(row))
        if images and self._images is None:
            raise RowRejectedError(IMAGE_UNSERVED, "image parts need a vision-language model with its processor")
        return renderer.render(turns, num_context_turns=num_context_turns, tools=row.get("tools")), images

    def _find_chat(self, template_options: object) -> chat.ChatRenderer:
        if self._chat is None:
            raise DataError("Messages need a chat template, and the tokenizer has none. Give chat_template.")
        return self._chat.with_options(read_template_options(template_options))

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
                ids, spans = place_spans(self._tokenizer, batch, number, example, notes=self.notes)
            # A chat template adds its own first and last tokens.
            finished = self._finish(ids, spans, add_ends=not example.is_chat, trains_all=not example.images)
            finished = finished._replace(notes=example.notes, images=example.images)
            highest = int(finished.input_ids.max(initial=-1))
            encoded.append(
                finished
                if highest <= highest_id(self._vocab_size)
                else impossible_id(highest, vocab_size=self._vocab_size)
            )
        return encoded

    def _encode_quoted(self, example: Rendered) -> tuple[list[int], list[tuple[int, int]]]:
        """Return ids and trained spans of a conversation with control tokens as plain text in user turns."""
        assert self._chat is not None
        controls = self._chat.controls
        batch, marked = controls.encode(example)
        ids, spans = place_spans(controls.marked, batch, 0, marked, notes=self.notes)
        return controls.own_ids(ids), spans

    def _finish(
        self, ids: list[int], spans: list[tuple[int, int]], *, add_ends: bool, trains_all: bool = True
    ) -> Encoded:
        """Set the trained flags; add the tokenizer's prefix and a trained end-of-sequence token.

        trains_all: Whether loss_on="all" may train every token, including those outside of the spans.
        """
        if not ids:
            return Encoded(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=bool))
        prefix = self._prefix_ids if add_ends and ids[: len(self._prefix_ids)] != self._prefix_ids else []
        suffix = [self._eos_id] if add_ends and self._eos_id is not None and ids[-1] != self._eos_id else []
        if add_ends and self._options.add_eos and self._eos_id is None:
            self.notes["texts without an end-of-sequence token, because the tokenizer has none"] += 1
        input_ids = np.asarray(prefix + ids + suffix, dtype=np.int64)
        is_trained = np.zeros(len(input_ids), dtype=bool)
        if self._options.loss_on == "all" and trains_all:
            is_trained[:] = True
        for begin, end in spans:
            is_trained[len(prefix) + begin : len(prefix) + end] = True
        if suffix:
            is_trained[-1] = True
        if not add_ends and spans and self._chat and not self._chat.ends_with_control(ids[slice(*spans[-1])]):
            self.notes[
                "conversations whose last trained token is not a special token: the model may not learn to stop there"
            ] += 1
        return Encoded(input_ids, is_trained)


def _refuse_chat_columns(tools: object, template_options: object) -> None:
    """Refuse what only a chat template reads, for a prompt that is a text."""
    if tools or read_template_options(template_options):
        name = "tools" if tools else OPTIONS
        raise RowRejectedError(WRONG_TYPE, f"a prompt with {name} must be a list of messages")


def _refuse_images(messages: Sequence[Mapping[str, Any]]) -> None:
    if any(isinstance(message.get("content"), list) for message in messages):
        raise RowRejectedError(IMAGE_WITH_COMPLETIONS, "they are not supported yet")


def _missing_tokenizer(format: str, *, file: str) -> DataError:
    return DataError(
        f"{file}: rows of format {format!r} need a tokenizer, and there is none. Give tokenizer, or save the "
        "tokenizer's files in the folder of the model."
    )


def _join(texts: _RowTexts, encoded: Iterator[Encoded | TokenIdError]) -> Encoded | RowRejectedError | TokenIdError:
    """Return the example of one row from the next encoded texts, or the first error."""
    parts: list[Encoded] = []
    found = [next(encoded) for _ in texts.rendered]
    for part in found:
        if isinstance(part, TokenIdError):
            return part
        parts.append(part)
    try:
        return texts.join(parts)
    except RowRejectedError as error:
        return error


def _join_completions(parts: Sequence[Encoded], *, scores: tuple[float, ...], must_differ: bool) -> Encoded:
    """Return the conversations of one row as one example, with their prompt once."""
    ids, is_trained, completions = join_completions(
        [part.input_ids for part in parts],
        [part.is_trained for part in parts],
        scores=scores,
        must_differ=must_differ,
    )
    notes = tuple(dict.fromkeys(note for part in parts for note in part.notes))
    return Encoded(ids, is_trained, notes, completions=completions)
