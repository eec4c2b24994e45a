"""Document: one tokenised example, as the data set returns it and the collator takes it, and its parts in a pack."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import torch

    from lightning_fastft.packing.images import ImageFile, ImageInputs

IGNORED_LABEL = -100


class Document(NamedTuple):
    """One tokenised example: ids and unshifted labels, each of shape (length,), -100 where nothing is trained.

    An example of a tuner with completions (preference, reward, policy) is a prompt and its completions, one after
    another in the ids.

    Args:
        input_ids: Token ids, int64.
        labels: Ids where a token is trained, else -100, int64.
        images: Its images in encoded form.
        image_inputs: What the images become for the model (packing/images.py).
        segment_lengths: Tokens of the prompt, then of each completion or step, all at least 1; () without completions.
        scores: One number per completion: what it is worth, a margin, a label or a reward.
        log_probs: Log-probability of each token under the model that wrote it, float32, shape (length,), 0 outside of
            completions; None where it is not known.
        is_stepwise: Whether the completions are steps of one answer, each behind all earlier ones.
    """

    input_ids: np.ndarray
    labels: np.ndarray
    images: tuple[ImageFile, ...] = ()
    image_inputs: ImageInputs | None = None
    segment_lengths: tuple[int, ...] = ()
    scores: tuple[float, ...] = ()
    log_probs: np.ndarray | None = None
    is_stepwise: bool = False


def last_turn(document: Document) -> tuple[list[int], list[int]]:
    """Return the last run of trained tokens of an example, as an answer, after what precedes it, as its prompt.

    Returns:
        prompt: Token ids; empty where the example begins with the answer.
        answer: Token ids.

    Example:
        >>> last_turn(Document(np.array([5, 6, 7, 8]), np.array([-100, 6, -100, 8])))
        ([5, 6, 7], [8])
    """
    is_trained_T = document.labels != IGNORED_LABEL
    end = len(is_trained_T) - int(np.argmax(is_trained_T[::-1]))
    untrained = np.flatnonzero(~is_trained_T[:end])
    begin = int(untrained[-1]) + 1 if len(untrained) else 0
    return document.input_ids[:begin].tolist(), document.input_ids[begin:end].tolist()


class Part(NamedTuple):
    """A document of a pack: a whole example, a prompt, or a completion behind its prompt.

    Args:
        input_ids: Token ids.
        labels: Unshifted labels.
        log_probs: Log-probability of each token; None where it is not known.
        distance: How many documents before it its prefix is; 0 for none.
        is_completion: Whether it is, or ends with, a completion.
    """

    input_ids: np.ndarray
    labels: np.ndarray
    log_probs: np.ndarray | None = None
    distance: int = 0
    is_completion: bool = False

    def rows(self, index: np.ndarray) -> Part:
        """Return a part of the chosen tokens."""
        log_probs = None if self.log_probs is None else self.log_probs[index]
        return Part(self.input_ids[index], self.labels[index], log_probs)


def split_document(document: Document, *, shares_prompt: bool) -> list[Part]:
    """Return the documents of the pack that an example becomes.

    Example:
        >>> ids = np.array([1, 2, 3, 7, 8])
        >>> document = Document(ids, ids, segment_lengths=(3, 1, 1), scores=(1.0, 0.0))
        >>> [part.input_ids.tolist() for part in split_document(document, shares_prompt=True)]
        [[1, 2], [3, 7], [3, 8]]
    """
    if not document.segment_lengths:
        return [Part(document.input_ids, document.labels)]
    num_prompt = document.segment_lengths[0]
    # The last token of the prompt begins each completion: it is the prompt's only row that has a target, another in
    # each.
    begin = num_prompt - 1 if shares_prompt else 0
    labels = document.labels.copy()
    labels[:num_prompt] = IGNORED_LABEL
    whole = Part(document.input_ids, labels, document.log_probs)
    if document.is_stepwise:
        return [whole._replace(is_completion=True)]
    parts = [whole.rows(np.arange(begin))] if begin else []
    start = num_prompt
    for number, length in enumerate(document.segment_lengths[1:]):
        rows = np.r_[begin:num_prompt, start : start + length]
        parts.append(whole.rows(rows)._replace(distance=number + 1 if begin else 0, is_completion=True))
        start += length
    return parts


def is_untouched_view(labels: torch.Tensor, *, of: torch.Tensor) -> bool:
    """Return whether labels share the memory of the context and were not written to; no host sync."""
    is_same = (
        labels.data_ptr() == of.data_ptr()
        and labels.numel() == of.numel()
        and labels.dtype is of.dtype
        and labels.device == of.device
    )
    # Inference tensors have no version counter; Lightning's evaluation creates them.
    return is_same and (labels.is_inference() or labels._version == 0)
