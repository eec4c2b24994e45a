"""Collate planned documents into one PackedBatch: concatenated tokens and their BatchContext."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from lightning_fastft.core.errors import ShapeError
from lightning_fastft.packing.completions import Completions
from lightning_fastft.packing.context import BatchContext
from lightning_fastft.packing.context_content import split_pad_tokens
from lightning_fastft.packing.document import IGNORED_LABEL, Document, Part, is_untouched_view, split_document
from lightning_fastft.packing.images import merge_inputs
from lightning_fastft.packing.pack_mask import PackMask
from lightning_fastft.packing.spans import BidirectionalSpans


class PackedBatch:
    """One packed micro-batch that any Hugging Face causal language model takes as ``model(**batch)``.

    ``keys`` and ``__getitem__`` make ``**batch`` and ``batch["input_ids"]`` work. To loop over the entries use
    ``items``: ``__iter__`` yields one tensor whose first size is num_items_in_batch, rounded. Lightning weighs epoch
    means by it, so ``self.log(..., model(**batch).loss, on_epoch=True)`` is the mean per labelled token, also under
    accumulation. A mean over the pack's own labelled tokens needs ``batch_size=batch.context.num_labelled``.

    The keys are input_ids, position_ids, labels and attention_mask of shape (1, T), int64; use_cache (False);
    num_items_in_batch; context. The attention mask refuses a transformers model without packed attention
    (``PackMask``). If documents have images, also what these become for the model, and position_ids may have shape
    (axes, 1, T).

    Args:
        input_id_T: Token ids, shape (T,), int64, on the device of the context.
        context: The metadata of this pack.
        images: Keyword arguments of the model for all images, in the order of the documents.
        position_AT: Positions of the tokens on several axes, shape (axes, T); None for those of text.
        index: Global number of this micro-batch in the plan of the run; -1 where there is no plan.
        numbers: Number of each document in its data set, for losses that look values up; empty where there is none.

    Raises:
        ShapeError: input_id_T does not have the context's token count.

    Example:
        >>> first = Document(np.array([5, 6]), np.array([-100, 6]))
        >>> batch = collate([first, Document(np.array([7, 8]), np.array([-100, 8]))])
        >>> batch["position_ids"].tolist(), batch.context.num_labelled
        ([[0, 1, 0, 1]], 2)
    """

    _KEYS = ("input_ids", "position_ids", "labels", "attention_mask", "use_cache", "num_items_in_batch", "context")

    def __init__(
        self,
        *,
        input_id_T: torch.Tensor,
        context: BatchContext,
        images: Mapping[str, torch.Tensor] | None = None,
        position_AT: torch.Tensor | None = None,
        index: int = -1,
        numbers: Sequence[int] = (),
    ) -> None:
        if input_id_T.shape != (context.num_tokens,):
            raise ShapeError(
                f"input_id_T must have shape ({context.num_tokens},) as in its context, got {tuple(input_id_T.shape)}."
            )
        self.context = context
        self.index = index
        self.numbers = tuple(numbers)
        mask_T = torch.ones_like(input_id_T)
        # The auxiliary loss of routers counts the tokens that the mask keeps.
        mask_T[context.num_real_tokens :] = 0
        self._items: dict[str, Any] = {
            "input_ids": input_id_T[None],
            "position_ids": context.position_T[None] if position_AT is None else position_AT[:, None],
            "labels": context.label_T[None],
            "attention_mask": mask_T[None],
            "use_cache": False,
            "num_items_in_batch": context.num_items,
            "context": context,
            **(images or {}),
        }

    def keys(self) -> tuple[str, ...]:
        """Return the keyword arguments that a model is called with."""
        return tuple(self._items)

    def __getitem__(self, key: str) -> Any:
        item = self._items[key]
        return PackMask.of(item, self.context) if key == "attention_mask" else item

    def __contains__(self, key: object) -> bool:
        return key in self._items

    def items(self) -> list[tuple[str, Any]]:
        """Return the pairs of ``keys`` and their values."""
        return [(key, self[key]) for key in self._items]

    def __len__(self) -> int:
        return len(self._items)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "has_own_labels": self._has_own_labels}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # PyTorch counts the tensors of a loader's worker as written to.
        has_own_labels = state.pop("has_own_labels")
        vars(self).update(state)
        labels = self.context.label_T.data[None] if has_own_labels else self._items["labels"].clone()
        self._items = {**self._items, "labels": labels}

    @property
    def _has_own_labels(self) -> bool:
        """Whether the labels are those of the context, whose labelled rows the loss then reads."""
        return is_untouched_view(self._items["labels"], of=self.context.label_T)

    @property
    def has_images(self) -> bool:
        """Whether a document of the pack has images."""
        return len(self._items) > len(self._KEYS)

    def __iter__(self) -> Iterator[torch.Tensor]:
        # Expanded, not allocated: Lightning reads only its first size.
        yield torch.empty(1).expand(max(1, round(self.context.num_items)))

    def to(self, device: torch.device | str, non_blocking: bool = True) -> PackedBatch:
        """Return the batch on a device. Copies from pinned memory are asynchronous."""
        if torch.device(device) == self.context.device:
            return self
        return self._map(
            lambda tensor: tensor.to(device, non_blocking=non_blocking),
            self.context.to(device, non_blocking=non_blocking),
        )

    def pin_memory(self) -> PackedBatch:
        """Return the batch in pinned host memory."""
        return self._map(lambda tensor: tensor.pin_memory(), self.context.pin_memory())

    def cut(self, rank: int, *, num_parts: int, group: Any = None) -> PackedBatch:
        """Return one of several equal, contiguous parts of this pack (``BatchContext.cut``).

        Raises:
            ShapeError: The parts would not be equal, or the pack has images or completions.
        """
        if self.has_images or self.context.completions is not None or self._items["position_ids"].ndim != 2:
            raise ShapeError("A pack with images, completions or positions on several axes is not cut into parts.")
        context = self.context.cut(rank, num_parts=num_parts, group=group)
        assert context.part is not None
        return PackedBatch(
            input_id_T=self._items["input_ids"][0, context.part.rows],
            context=context,
            index=self.index,
            numbers=self.numbers,
        )

    def _map(self, move: Callable[[torch.Tensor], torch.Tensor], context: BatchContext) -> PackedBatch:
        other = object.__new__(PackedBatch)
        other.context = context
        other.index = self.index
        other.numbers = self.numbers
        # Views of tensors that the context has moved already, so that each is copied once.
        shared: dict[str, Any] = {"context": context}
        if self._has_own_labels:
            shared["labels"] = context.label_T[None]
        if self._items["position_ids"].ndim == 2:
            shared["position_ids"] = context.position_T[None]
        other._items = {
            name: shared[name] if name in shared else move(item) if isinstance(item, torch.Tensor) else item
            for name, item in self._items.items()
        }
        return other


def collate(
    documents: Sequence[Document],
    *,
    pad_to: int | None = None,
    pad_to_multiple_of: int = 1,
    pad_token_id: int = 0,
    num_items: float | None = None,
    index: int = -1,
    shares_prompts: bool = True,
    numbers: Sequence[int] = (),
) -> PackedBatch:
    """Return one batch of concatenated documents with their context.

    The first label of every document becomes -100, so that no token is predicted across a document border. The pad tail
    becomes separate documents, none longer than the longest real one, so that offsets cover every token. Image inputs
    are joined in the order of the documents, which is the order of their tokens.

    A document with completions becomes its prompt and, for each completion, a document that continues it. The last
    token of the prompt, which predicts the first of a completion, begins each completion instead. A document of steps
    stays whole, and each step counts as a completion.

    Args:
        documents: Documents of the pack, at least one unless pad_to is given.
        pad_to: Length of the pack in tokens; None for no padding.
        pad_to_multiple_of: The length is rounded up to a multiple of this.
        pad_token_id: Token id of the pad tail.
        num_items: Divisor of the summed loss; None for the pack's own labelled tokens (validation, or one pack per
            step).
        index: Global number of the micro-batch in the plan.
        shares_prompts: Whether completions share their prompt; else each gets a copy of it, for models whose layers
            cannot continue a prefix.
        numbers: Number of each document in its data set, for losses that look values up by it.

    Returns:
        A batch on the CPU.

    Raises:
        ShapeError: A document is empty, ids and labels differ in length, segments do not add up to the ids, only some
            documents have completions, or the documents do not fit pad_to.

    Cost:
        One pass over the tokens on the host.
    """
    has_completions = _check_documents(documents)
    parts = [part for document in documents for part in split_document(document, shares_prompt=shares_prompts)]
    lengths = [len(part.input_ids) for part in parts]
    num_real_tokens = sum(lengths)
    if pad_to is not None and num_real_tokens > pad_to:
        raise ShapeError(f"{len(documents)} documents have {num_real_tokens} tokens and exceed pad_to={pad_to}.")
    num_tokens = num_real_tokens if pad_to is None else pad_to
    num_pad_tokens = num_tokens + -num_tokens % pad_to_multiple_of - num_real_tokens
    input_id_T, label_T = _concatenate(parts, num_tokens=num_real_tokens + num_pad_tokens, pad_token_id=pad_token_id)
    num_labelled = int((label_T != IGNORED_LABEL).sum())
    pad_lengths = split_pad_tokens(num_pad_tokens, longest=max(lengths, default=num_pad_tokens))
    prefixes = [number - part.distance if part.distance else -1 for number, part in enumerate(parts)]
    context = BatchContext(
        lengths=lengths + pad_lengths,
        label_T=label_T,
        num_pad_tokens=num_pad_tokens,
        num_items=max(1, num_labelled) if num_items is None else num_items,
        prefixes=prefixes + [-1] * len(pad_lengths),
    )
    if has_completions:
        context.completions = _join_completions(documents, parts, context=context)
    inputs = [document.image_inputs for document in documents if document.image_inputs is not None]
    context.spans = _join_spans(documents, context=context)
    context.position_lengths = _find_position_lengths(documents, lengths=context.lengths)
    return PackedBatch(
        input_id_T=input_id_T,
        context=context,
        images=merge_inputs(inputs) if inputs else None,
        position_AT=_join_positions(documents, position_T=context.position_T),
        index=index,
        numbers=numbers,
    )


def _check_documents(documents: Sequence[Document]) -> bool:
    """Return whether the documents have completions; refuse what would be cut at the wrong places."""
    for number, document in enumerate(documents):
        if len(document.input_ids) != len(document.labels):
            raise ShapeError(f"Document {number} has {len(document.input_ids)} ids and {len(document.labels)} labels.")
        lengths = document.segment_lengths
        if bool(lengths) != bool(documents[0].segment_lengths):
            raise ShapeError(f"Document {number} {'has' if lengths else 'has no'} completions, unlike document 0.")
        if lengths and (len(lengths) < 2 or min(lengths) < 1 or sum(lengths) != len(document.input_ids)):
            raise ShapeError(
                f"Document {number} has segments of {lengths} tokens and {len(document.input_ids)} ids: a prompt and "
                "completions of at least one token each must add up to the ids."
            )
        if lengths and (document.images or document.image_inputs is not None):
            raise ShapeError(f"Document {number} has images and completions, which packs do not hold together.")
    return bool(documents) and bool(documents[0].segment_lengths)


def _join_completions(documents: Sequence[Document], parts: Sequence[Part], *, context: BatchContext) -> Completions:
    """Return which labelled rows belong to which completion."""
    log_prob_R = None
    if any(document.log_probs is not None for document in documents):
        log_probs = [np.full(len(part.labels), np.nan) if part.log_probs is None else part.log_probs for part in parts]
        log_prob_T = torch.from_numpy(np.concatenate(log_probs).astype(np.float32))
        log_prob_R = torch.zeros(len(context.labelled_row_R))
        log_prob_R[: context.num_labelled] = log_prob_T[context.labelled_row_R[: context.num_labelled] + 1]
    return Completions(
        num_rows=_count_rows(documents, parts),
        num_completions=[len(document.segment_lengths) - 1 for document in documents],
        scores=[score for document in documents for score in document.scores],
        last_tokens=_find_last_tokens(documents, parts),
        num_padded_rows=len(context.labelled_row_R),
        log_prob_R=log_prob_R,
    )


def _count_rows(documents: Sequence[Document], parts: Sequence[Part]) -> list[int]:
    """Return the labelled rows of each completion or step."""
    completions = (part for part in parts if part.is_completion)
    counts = []
    for document in documents:
        if document.is_stepwise:
            cuts = np.cumsum(document.segment_lengths)[:-1]
            counts += [int((labels != IGNORED_LABEL).sum()) for labels in np.split(next(completions).labels, cuts)[1:]]
        else:
            counts += [int((next(completions).labels[1:] != IGNORED_LABEL).sum()) for _ in document.scores]
    return counts


def _find_last_tokens(documents: Sequence[Document], parts: Sequence[Part]) -> list[int]:
    """Return the place in the pack of the last token of each completion or step."""
    end_S = np.cumsum([len(part.input_ids) for part in parts])
    ends = (int(end) for end, part in zip(end_S, parts) if part.is_completion)
    places: list[int] = []
    for document in documents:
        if document.is_stepwise:
            begin = next(ends) - len(document.input_ids)
            places += (begin + np.cumsum(document.segment_lengths)[1:] - 1).tolist()
        else:
            places += [next(ends) - 1 for _ in document.scores]
    return places


def _join_spans(documents: Sequence[Document], *, context: BatchContext) -> BidirectionalSpans | None:
    """Return the images of all documents whose tokens see each other in both directions."""
    spans, in_windows_only = [], False
    # A document with images is one document of the pack.
    for document, start in zip(documents, context.start_host_S1.tolist()):
        inputs = document.image_inputs
        if inputs is not None and inputs.spans:
            spans += [(start + begin, start + end) for begin, end in inputs.spans]
            in_windows_only = inputs.in_windows_only
    if not spans:
        return None
    return BidirectionalSpans.build(spans, in_windows_only=in_windows_only, document_T=context.document_T)


def _join_positions(documents: Sequence[Document], *, position_T: torch.Tensor) -> torch.Tensor | None:
    """Return positions on several axes, each document's own; those of text where it has none. None if none has any."""
    found = [inputs.position_AT for document in documents if (inputs := document.image_inputs) is not None]
    num_axes = next((position_AT.shape[0] for position_AT in found if position_AT is not None), None)
    if num_axes is None:
        return None
    position_AT = position_T.repeat(num_axes, 1)
    start = 0
    for document in documents:
        end = start + len(document.input_ids)
        if document.image_inputs is not None and document.image_inputs.position_AT is not None:
            position_AT[:, start:end] = document.image_inputs.position_AT
        start = end
    return position_AT


def _find_position_lengths(documents: Sequence[Document], *, lengths: Sequence[int]) -> tuple[int, ...]:
    """Return the largest position of each document of the pack plus 1, which is not its length if images have positions
    on several axes. Such a pack has one document for each of these, and then pad documents.
    """
    found = list(lengths)
    for number, document in enumerate(documents):
        if document.image_inputs is not None and document.image_inputs.position_AT is not None:
            found[number] = int(document.image_inputs.position_AT.max()) + 1
    return tuple(found)


def _concatenate(documents: Sequence[Part], *, num_tokens: int, pad_token_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and labels of the pack, padded at the end; the first label of each document is masked."""
    ids = np.full(num_tokens, pad_token_id, dtype=np.int64)
    labels = np.full(num_tokens, IGNORED_LABEL, dtype=np.int64)
    start = 0
    for document in documents:
        end = start + len(document.input_ids)
        ids[start:end] = document.input_ids
        labels[start + 1 : end] = document.labels[1:]
        start = end
    return torch.from_numpy(ids), torch.from_numpy(labels)
