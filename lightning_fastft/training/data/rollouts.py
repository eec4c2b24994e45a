"""Prompts and rollouts as rows and documents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from lightning_fastft.core.errors import DataError, OptionError
from lightning_fastft.packing.document import IGNORED_LABEL, Document
from lightning_fastft.packing.reading.sources import open_sources
from lightning_fastft.packing.rows.messages import check_messages
from lightning_fastft.packing.rows.parsing import check_text, parse_row
from lightning_fastft.packing.rows.rejects import MISSING_COLUMN, RowRejectedError
from lightning_fastft.packing.rows.template_options import OPTIONS
from lightning_fastft.packing.tokens.formatter import Encoded, Formatter
from lightning_fastft.packing.tokens.token_ids import TokenIdError
from lightning_fastft.training.samplers import Sampled

if TYPE_CHECKING:
    from lightning_fastft.training.tuner import Tuner

PROMPT, COMPLETION, TOOLS = "prompt", "completion", "tools"


def make_rollout(
    prompt: Sequence[int], group: Sequence[Sampled], scores: Sequence[float], *, end_ids: Sequence[int] | None = None
) -> Document:
    """Return a prompt with its sampled completions as a document.

    Args:
        prompt: Token ids of the prompt.
        group: The completions.
        scores: A number for each completion.
        end_ids: Tokens that end texts. A completion that ends with another one has no labels. None: all have labels.

    Raises:
        DataError: A completion is empty, or its log-probabilities or its is_trained have another length.
    """
    for number, sampled in enumerate(group):
        if not sampled.input_ids:
            raise DataError(f"The sampler returned completion {number} without a token.")
        for what, values in (("log-probabilities", sampled.log_probs), ("flags in is_trained", sampled.is_trained)):
            if values is not None and len(values) != len(sampled.input_ids):
                raise DataError(
                    f"The sampler returned {len(values)} {what} for the {len(sampled.input_ids)} tokens of completion "
                    f"{number}."
                )
    completions = [token for sampled in group for token in sampled.input_ids]
    input_ids = np.array([*prompt, *completions], dtype=np.int64)
    labels = input_ids.copy()
    labels[: len(prompt)] = IGNORED_LABEL
    end = len(prompt)
    for sampled in group:
        begin, end = end, end + len(sampled.input_ids)
        if end_ids is not None and sampled.input_ids[-1] not in end_ids:
            labels[begin:end] = IGNORED_LABEL
        elif sampled.is_trained is not None:
            labels[begin:end][~np.array(sampled.is_trained, dtype=bool)] = IGNORED_LABEL
    log_probs = None
    if all(sampled.log_probs is not None for sampled in group):
        known = [value for sampled in group for value in sampled.log_probs or ()]
        log_probs = np.array([*([0.0] * len(prompt)), *known], dtype=np.float32)
    lengths = (len(prompt), *(len(sampled.input_ids) for sampled in group))
    return Document(input_ids, labels, segment_lengths=lengths, scores=tuple(scores), log_probs=log_probs)


def find_end_ids(tuner: Tuner) -> list[int]:
    """Return the ids of the tokens at which generation stops; empty if they are not known."""
    known = [*(tuner.stop_ids or ()), *([] if tuner.answer_end is None else [tuner.answer_end])]
    if known or tuner.tokenizer is None:
        return known
    return [] if tuner.tokenizer.eos_token_id is None else [tuner.tokenizer.eos_token_id]


def require_end_ids(tuner: Tuner) -> list[int]:
    """Return the ids of the tokens at which generation stops.

    Raises:
        OptionError: None is known.
    """
    end_ids = find_end_ids(tuner)
    if not end_ids:
        raise OptionError(
            "mask_truncated=True masks completions without an end, and neither the model nor the tokenizer has a token "
            "that ends a text. Give the tokenizer an eos_token, or leave mask_truncated out."
        )
    return end_ids


def read_prompts(source: Any) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the rows of prompts and the place of each, for messages."""
    rows, places = [], []
    for opened in open_sources(source):
        for raw in opened.read(None):
            places.append(f"{opened.name}, {opened.counts} {raw.line}")
            rows.append(read_prompt(raw.raw, place=places[-1]))
    return rows, places


def read_prompt(raw: Any, *, place: str) -> dict[str, Any]:
    """Return a row whose prompt is a text or a list of messages."""
    try:
        row = parse_row(raw if raw is not None else b"")
        if PROMPT not in row:
            raise RowRejectedError(MISSING_COLUMN, f"{PROMPT!r}; the row has {', '.join(map(repr, row)) or 'none'}")
        prompt = row.get(PROMPT)
        if isinstance(prompt, (list, tuple)):
            row[PROMPT] = check_messages(prompt, column=PROMPT, needs_assistant=False)
        else:
            row[PROMPT] = check_text(prompt, column=PROMPT)
    except RowRejectedError as error:
        raise DataError(
            f"{place}: {error}. Every row needs the column {PROMPT}: a text, or a list of messages."
        ) from error
    return row


def encode_prompt_ids(formatter: Formatter, row: Mapping[str, Any], *, place: str) -> list[int]:
    """Return the token ids of the prompt of a row, at least one.

    Raises:
        DataError: The prompt has no token, or cannot be rendered.
    """
    try:
        ids = formatter.encode_prompt(row[PROMPT], tools=row.get(TOOLS), template_options=row.get(OPTIONS))
    except (RowRejectedError, TokenIdError) as error:
        raise DataError(f"{place}: {error}") from error
    if not ids:
        raise DataError(f"{place}: the prompt {row[PROMPT]!r:.80} has no token.")
    return ids


def encode_given(
    formatter: Formatter,
    rows: Sequence[Mapping[str, Any]],
    places: Sequence[str],
    *,
    max_tokens: int,
    sampled_share: float,
) -> list[Document]:
    """Return each row's own completion behind its prompt.

    Raises:
        DataError: A row has none, or one that cannot be trained or does not fit max_tokens.
    """
    for place, row in zip(places, rows):
        if row.get(COMPLETION) is None:
            raise DataError(
                f"{place}: the row has no completion, and sampled_share={sampled_share} trains on those of rows: add "
                "the column completion, or sample all of them with --data.sampled_share 1.0."
            )
    documents = []
    kept = (PROMPT, TOOLS, OPTIONS)
    shaped = [
        {**{name: row.get(name) for name in kept}, "completions": [row[COMPLETION]], "rewards": [0.0]} for row in rows
    ]
    for place, found in zip(places, formatter.encode(shaped, format="rollouts")):
        if not isinstance(found, Encoded):
            raise DataError(
                f"{place}: {found}. With sampled_share={sampled_share} completion must be a text where prompt is a "
                "text, and messages where prompt is messages."
            ) from found
        if len(found.input_ids) > max_tokens:
            raise DataError(
                f"{place}: prompt and completion have {len(found.input_ids)} tokens, and max_tokens is {max_tokens}."
            )
        assert found.completions is not None
        labels = np.where(found.is_trained, found.input_ids, IGNORED_LABEL)
        lengths, scores = found.completions.segment_lengths, found.completions.scores
        documents.append(Document(found.input_ids, labels, segment_lengths=lengths, scores=scores))
    return documents
