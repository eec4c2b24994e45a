"""Document: one tokenised example, as the data set returns it and the collator takes it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
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
