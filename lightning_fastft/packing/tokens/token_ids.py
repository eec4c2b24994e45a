"""Encoded: an example as token ids with trained flags. Rows that are ids already are encoded here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from lightning_fastft.core.errors import DataError
from lightning_fastft.packing.document import IGNORED_LABEL
from lightning_fastft.packing.images import ImageFile
from lightning_fastft.packing.rows.completion_rows import join_ids, read_rollout_ids
from lightning_fastft.packing.rows.rejects import LABELS_DIFFER, LENGTHS_DIFFER, PADDED, WRONG_TYPE, RowRejectedError
from lightning_fastft.packing.store.completion_store import Segments

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_TOKEN_ID = 2**31 - 1
# Columns of TRL that say which ids are trained.
MASKS = ("completion_mask", "assistant_masks")


class Encoded(NamedTuple):
    """One example as tokens: ids (int64) and trained flags (bool), both of shape (length,); remarks on its row, its
    images and its completions.
    """

    input_ids: np.ndarray
    is_trained: np.ndarray
    notes: tuple[str, ...] = ()
    images: tuple[ImageFile, ...] = ()
    completions: Segments | None = None


class TokenIdError(DataError):
    """Raised for a token id or label outside of the embedding, which would trigger a device assert in training."""


def highest_id(vocab_size: int | None) -> int:
    """Return the highest possible token id."""
    return MAX_TOKEN_ID if vocab_size is None else vocab_size - 1


def impossible_id(token_id: int, *, vocab_size: int | None, what: str = "token id", others: str = "") -> TokenIdError:
    """Return the error on an id outside of the embedding; others: what is allowed besides ids."""
    rows = "" if vocab_size is None else f", the embedding has {vocab_size} rows"
    return TokenIdError(f"{what} {token_id} is impossible: ids are 0 to {highest_id(vocab_size)}{rows}{others}")


def encode_ids(row: Mapping[str, Any], *, vocab_size: int | None, loss_on: str) -> Encoded:
    """Return the example of a row of format input_ids.

    ``loss_on="all"`` trains every id. "completion" trains the labelled ones; without labels those that are 1 in all
    masks (TRL's completion_mask and assistant_masks), and without masks every id.

    Raises:
        TokenIdError: An id or a label is outside of the embedding.
        RowRejectedError: A column is not a list of integers, labels are not the ids, or an attention_mask hides tokens.
    """
    ids = _read_ids(row["input_ids"], column="input_ids", vocab_size=vocab_size)
    _refuse_padding(row.get("attention_mask"), num_ids=len(ids), vocab_size=vocab_size)
    is_trained = np.ones(len(ids), dtype=bool)
    for name in MASKS:
        if name in row:
            is_trained &= _read_mask(row[name], column=name, num_ids=len(ids))
    if "labels" in row:
        is_trained = _read_labels(row["labels"], ids=ids, vocab_size=vocab_size)
    return Encoded(ids, is_trained if loss_on == "completion" else np.ones(len(ids), dtype=bool))


def _read_mask(value: object, *, column: str, num_ids: int) -> np.ndarray:
    """Return which ids a mask of zeros and ones, or of false and true, trains."""
    mask = np.asarray(value) if isinstance(value, (list, tuple, np.ndarray)) else np.zeros(0, dtype=object)
    if mask.size and (mask.ndim != 1 or mask.dtype.kind not in "iub" or not np.isin(mask, (0, 1)).all()):
        raise RowRejectedError(WRONG_TYPE, f"{column} must be a list of zeros and ones")
    if len(mask) != num_ids:
        raise RowRejectedError(LENGTHS_DIFFER, f"{num_ids} input_ids and a {column} of {len(mask)}")
    return mask.astype(bool)


def _read_labels(value: object, *, ids: np.ndarray, vocab_size: int | None) -> np.ndarray:
    """Return which ids have a label."""
    labels = _to_array(value, column="labels", vocab_size=vocab_size)
    is_trained: np.ndarray = labels != IGNORED_LABEL
    named = labels[is_trained]
    if named.size and (named.min() < 0 or named.max() > highest_id(vocab_size)):
        wrong = int(named.min() if named.min() < 0 else named.max())
        raise impossible_id(wrong, vocab_size=vocab_size, what="label", others=f" or {IGNORED_LABEL}")
    if len(labels) != len(ids):
        raise RowRejectedError(LABELS_DIFFER, f"{len(ids)} input_ids and {len(labels)} labels")
    if (named != ids[is_trained]).any():
        place = int(np.flatnonzero(is_trained & (labels != ids))[0])
        raise RowRejectedError(
            LABELS_DIFFER,
            f"position {place} has label {int(labels[place])} and id {int(ids[place])}; labels must be unshifted "
            "ids or -100",
        )
    return is_trained


def _refuse_padding(mask: object, *, num_ids: int, vocab_size: int | None) -> None:
    """Raise for an attention_mask that hides tokens: they would be trained as text."""
    if mask is None:
        return
    seen = _to_array(mask, column="attention_mask", vocab_size=vocab_size)
    if len(seen) != num_ids:
        raise RowRejectedError(LENGTHS_DIFFER, f"{num_ids} input_ids and an attention_mask of {len(seen)}")
    num_hidden = int((seen == 0).sum())
    if num_hidden:
        raise RowRejectedError(
            PADDED, f"attention_mask hides {num_hidden} of {num_ids} tokens; store the row without padding"
        )


def encode_rollout_ids(row: Mapping[str, Any], *, vocab_size: int | None) -> Encoded:
    """Return the example of a rollout whose prompt and completions are ids.

    Raises:
        TokenIdError: An id is outside of the embedding.
        RowRejectedError: A column has a wrong type, or columns differ in length.
    """
    completions, scores, log_probs = read_rollout_ids(row)
    ids, is_trained, joined = join_ids(
        _read_ids(row["prompt_ids"], column="prompt_ids", vocab_size=vocab_size),
        [
            _read_ids(value, column=f"completion_ids[{number}]", vocab_size=vocab_size)
            for number, value in enumerate(completions)
        ],
        scores=scores,
        log_probs=log_probs,
    )
    return Encoded(ids, is_trained, completions=joined)


def _read_ids(value: object, *, column: str, vocab_size: int | None) -> np.ndarray:
    ids = _to_array(value, column=column, vocab_size=vocab_size)
    if ids.size and (ids.min() < 0 or ids.max() > highest_id(vocab_size)):
        raise impossible_id(int(ids.min() if ids.min() < 0 else ids.max()), vocab_size=vocab_size)
    return ids


def _to_array(value: object, *, column: str, vocab_size: int | None) -> np.ndarray:
    if isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype.kind in "iu":
        return value.astype(np.int64)
    if not isinstance(value, (list, tuple)) or not all(type(entry) is int for entry in value):
        raise RowRejectedError(WRONG_TYPE, f"{column} must be a list of integers")
    try:
        return np.asarray(value, dtype=np.int64)
    except OverflowError:
        raise impossible_id(max(value, key=abs), vocab_size=vocab_size, what=column) from None


def find_prefix(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens that a tokenizer adds before a text, such as a beginning-of-sequence token."""
    plain = list(tokenizer("a", add_special_tokens=False)["input_ids"])
    whole = list(tokenizer("a", add_special_tokens=True)["input_ids"])
    for begin in range(len(whole) - len(plain) + 1):
        if whole[begin : begin + len(plain)] == plain:
            return whole[:begin]
    return []
