"""PackedLoader: planned micro-batches in order from any position, read and collated by a background thread.

Axes: N documents of a data set, U runs of documents with one prompt.
"""

from __future__ import annotations

import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from lightning_fastft.core.errors import DataError
from lightning_fastft.packing.collate import Document, PackedBatch, collate
from lightning_fastft.packing.completions import Completions
from lightning_fastft.packing.images import ImageInputs
from lightning_fastft.packing.step_plan import EpochPlan, StepPlan

if TYPE_CHECKING:
    from lightning_fastft.packing.store.dataset import TokenizedDataset

# Length of a pack without documents: the model still runs on it, so that all ranks do the same micro-batches.
EMPTY_PACK_TOKENS = 8
# Batches that wait for the trainer: enough to hide a few slow reads with little pinned memory.
NUM_AHEAD = 4
THREAD_NAME = "fastft-loader"
# Number of micro-batches of an epoch of unknown length. Lightning reads one batch ahead from a loader without a length.
ENDLESS = 10**9

T = TypeVar("T")


class DocumentSubset:
    """Select documents of a tokenised data set, renumbered from 0: the training or the held-out part.

    Args:
        documents: The whole data set.
        index_N: Numbers of the chosen documents, ascending, int64; None for all.
        shares_prompts: Whether completions of a document share its prompt in a pack; no effect on documents without
            completions.
        adds_mismatched: Whether each document gets the first completion of one with another prompt as its last, with a
            score of 0 (``DataNeeds``).
    """

    def __init__(
        self,
        documents: TokenizedDataset,
        *,
        index_N: np.ndarray | None = None,
        shares_prompts: bool = True,
        adds_mismatched: bool = False,
    ) -> None:
        self.documents = documents
        self.index_N = index_N
        self.shares_prompts = shares_prompts
        self.adds_mismatched = adds_mismatched
        self._other_N = _find_mismatched(documents) if adds_mismatched else None
        length_N = _count_computed(documents, shares_prompts=shares_prompts, other_N=self._other_N)
        # Tokens that a pack computes for each document.
        self.length_N = np.asarray(length_N if index_N is None else length_N[index_N], dtype=np.int64)
        self.num_labelled_N = np.asarray(
            documents.num_labelled_N if index_N is None else documents.num_labelled_N[index_N], dtype=np.int64
        )

    def __len__(self) -> int:
        return len(self.length_N)

    def __getitem__(self, number: int) -> Document:
        place = self.number_of(number)
        if self._other_N is None:
            return self.documents[place]
        return _add_mismatched(self.documents[place], self.documents[int(self._other_N[place])])

    def is_like(self, other: DocumentSubset) -> bool:
        """Return whether both select documents of one data set in the same way."""
        return (
            self.documents is other.documents
            and self.shares_prompts == other.shares_prompts
            and self.adds_mismatched == other.adds_mismatched
        )

    def number_of(self, number: int) -> int:
        """Return the number of a document in the whole data set."""
        return int(number if self.index_N is None else self.index_N[number])


def _find_mismatched(documents: TokenizedDataset) -> np.ndarray:
    """Return for each document the one whose completion does not answer its prompt, int64, shape (N,).

    It is the next one. Neighbours often have the same prompt (rows made of pairs): each of a run of such documents gets
    the one at its place in the next run.
    """
    is_same_N = documents.has_prompt_of_next()
    number_N = np.arange(len(is_same_N))
    if is_same_N.all():
        return np.roll(number_N, -1)
    is_first_N = ~np.roll(is_same_N, 1)
    # From the first document of a run on, because the last run may go on at the beginning.
    order_N = np.roll(number_N, -int(np.argmax(is_first_N)))
    begin_U = np.flatnonzero(is_first_N[order_N])
    length_U = np.diff(np.append(begin_U, len(order_N)))
    run_N = np.cumsum(is_first_N[order_N]) - 1
    next_N = (run_N + 1) % len(begin_U)
    other_N = np.empty_like(order_N)
    other_N[order_N] = order_N[begin_U[next_N] + (number_N - begin_U[run_N]) % length_U[next_N]]
    return other_N


def _count_computed(documents: TokenizedDataset, *, shares_prompts: bool, other_N: np.ndarray | None) -> np.ndarray:
    """Return the tokens that each document takes in a pack (``document.split_document``), int64."""
    store = documents.completions
    if store is None:
        return documents.length_N
    num_prompt_N, num_completions_N = store.num_prompt_tokens_N, store.num_completions_N
    num_tokens_N = store.num_completion_tokens_N
    if other_N is not None:
        num_completions_N, num_tokens_N = num_completions_N + 1, num_tokens_N + num_tokens_N[other_N]
    num_copied_N = num_completions_N * num_prompt_N if not shares_prompts else num_prompt_N - 1 + num_completions_N
    # Steps are in a row behind their prompt.
    return np.where(store.is_stepwise_N, num_prompt_N, num_copied_N) + num_tokens_N


def _add_mismatched(document: Document, other: Document) -> Document:
    """Return a document with one completion, and the completion of another one behind it."""
    num_prompt = other.segment_lengths[0]
    return document._replace(
        input_ids=np.concatenate([document.input_ids, other.input_ids[num_prompt:]]),
        labels=np.concatenate([document.labels, other.labels[num_prompt:]]),
        segment_lengths=(*document.segment_lengths, *other.segment_lengths[1:]),
        scores=(*document.scores, 0.0),
        log_probs=None,
    )


class PlannedStream:
    """Yield the micro-batches of one rank from a global position to the end of that position's epoch.

    Args:
        subset: The documents that the plan numbers.
        plan: The StepPlan of the run.
        rank: This process among plan.world_size.
        start: Global position: micro-batches trained in all epochs so far.
        weigh_by_window: True divides the loss by the labelled tokens of the accumulation window (training); False
            divides by those of the pack.
        repeat_first_epoch: True repeats the order of epoch 0 in every epoch (``overfit_batches``).
        encode_images: Returns what the images of a document become for the model; called by the thread that reads.
        first_number: Number in the data set from which ``batch.numbers`` count.
        padding: The padding of packs, as ``collate`` takes it.
    """

    def __init__(
        self,
        subset: DocumentSubset,
        plan: StepPlan,
        *,
        rank: int,
        start: int = 0,
        weigh_by_window: bool = True,
        repeat_first_epoch: bool = False,
        encode_images: Callable[[Document], ImageInputs] | None = None,
        first_number: int = 0,
        **padding: Any,
    ) -> None:
        self.subset = subset
        self.plan = plan
        self.rank = rank
        self.start = start
        self.padding = padding
        self.weigh_by_window = weigh_by_window
        self.repeat_first_epoch = repeat_first_epoch
        self.encode_images = encode_images
        self.first_number = first_number

    def __len__(self) -> int:
        return self.plan.num_micro_batches - self.start % self.plan.num_micro_batches

    def __iter__(self) -> Iterator[PackedBatch]:
        epoch, begin = divmod(self.start, self.plan.num_micro_batches)
        epoch_plan = self.plan.epoch(0 if self.repeat_first_epoch else epoch)
        for micro_batch in range(begin, self.plan.num_micro_batches):
            yield self._collate(epoch_plan, micro_batch, index=epoch * self.plan.num_micro_batches + micro_batch)

    def _collate(self, epoch_plan: EpochPlan, micro_batch: int, *, index: int) -> PackedBatch:
        numbers = epoch_plan.documents(rank=self.rank, micro_batch=micro_batch)
        documents = [self._prepare(self.subset[number]) for number in numbers]
        batch = collate(
            documents,
            **pad_empty(documents, self.padding),
            num_items=float(epoch_plan.num_items_M[micro_batch]) if self.weigh_by_window else None,
            index=index,
            shares_prompts=self.subset.shares_prompts,
            numbers=[self.subset.number_of(number) - self.first_number for number in numbers],
        )
        if not documents and self.subset.documents.completions is not None:
            batch.context.completions = Completions.none()
        return batch

    def _prepare(self, document: Document) -> Document:
        if not document.images:
            return document
        if self.encode_images is None:
            raise DataError("The data has images, and nothing turns them into inputs of the model. Give a processor.")
        return document._replace(image_inputs=self.encode_images(document))


def pad_empty(documents: Sequence[Document], padding: Mapping[str, Any]) -> dict[str, Any]:
    """Return the padding of a pack: a pack without documents has some tokens too."""
    is_empty = not documents and padding.get("pad_to") is None
    return {**padding, "pad_to": EMPTY_PACK_TOKENS} if is_empty else dict(padding)


def _do_nothing(*_: PackedBatch) -> None:
    """Do nothing: the default hook."""


class PackedLoader:
    """Iterate over packed micro-batches; each iteration opens a new stream when its first batch is requested.

    Lightning creates iterators before it restores the position of a checkpoint, so the stream must not be opened
    earlier. No worker process is started, because forking a process with threads can deadlock.

    The loader has a state for Lightning, which warns on every resume inside an epoch without one. It is empty, because
    the data module stores the position.

    Args:
        open_stream: Returns the stream of the next iteration.
        num_batches: Micro-batches per epoch, the same on all ranks.
        num_workers: 0 reads and collates on request; any other number uses one thread, up to four batches ahead.
        pin_memory: Put batches into pinned host memory.
        before_batch: Called before a batch is yielded, in the consumer's thread.
        after_batch: Called with a batch when the next one is requested, in the consumer's thread.
        find_run: Returns the run, a Trainer for example, whose ranks and accumulation the plan is made for; None for
            one process without accumulation.
    """

    def __init__(
        self,
        open_stream: Callable[[], Iterable[PackedBatch]],
        *,
        num_batches: int,
        num_workers: int = 0,
        pin_memory: bool = False,
        before_batch: Callable[[], None] = _do_nothing,
        after_batch: Callable[[PackedBatch], None] = _do_nothing,
        find_run: Callable[[], Any] = _do_nothing,
    ) -> None:
        self._open_stream = open_stream
        self._num_batches = num_batches
        self.num_workers = num_workers
        self.pin_memory = pin_memory
        self._before_batch = before_batch
        self._after_batch = after_batch
        self.find_run = find_run

    def __len__(self) -> int:
        return self._num_batches

    def __iter__(self) -> Iterator[PackedBatch]:
        batches = iter(self._open_stream())
        if self.pin_memory and torch.cuda.is_available():
            batches = (batch.pin_memory() for batch in batches)
        elif self.pin_memory:
            warnings.warn("pin_memory=True has no effect without a CUDA device.", stacklevel=2)
        for batch in prefetch(batches) if self.num_workers else batches:
            self._before_batch()
            yield batch
            self._after_batch(batch)

    def state_dict(self) -> dict[str, Any]:
        """Return an empty state."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Ignore the state; the data module restores the position."""


def prefetch(batches: Iterator[T], *, num_ahead: int = NUM_AHEAD) -> Iterator[T]:
    """Yield the items of an iterator, computed by one background thread at most num_ahead items ahead.

    An exception of the iterator is raised in the order of its items, with its traceback. The thread ends when this
    generator is exhausted, closed or garbage collected, and at the latest before the interpreter is finalised.

    Args:
        batches: Used only by the thread; none of its items is None.
        num_ahead: Maximum number of items that wait, at least 1.

    Cost:
        About 20 microseconds of the consumer's thread per item.

    Example:
        >>> list(prefetch(iter("abc")))
        ['a', 'b', 'c']
    """
    executor = ThreadPoolExecutor(1, thread_name_prefix=THREAD_NAME, initializer=_same_device())
    try:
        waiting = deque(executor.submit(next, batches, None) for _ in range(num_ahead))
        while (batch := waiting.popleft().result()) is not None:
            waiting.append(executor.submit(next, batches, None))
            yield batch
    finally:
        # Python 3.12.0 to 3.12.3 keep the variables of a closed generator, so the thread must be told.
        # During finalisation the thread has been joined, and modules that shutdown needs may be gone.
        if not sys.is_finalizing():
            executor.shutdown(wait=False, cancel_futures=True)


def _same_device() -> Callable[[], None]:
    """Return a function that sets this thread's CUDA device in another thread, which pins memory in its context."""
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return _do_nothing
    device = torch.cuda.current_device()
    return lambda: torch.cuda.set_device(device)
