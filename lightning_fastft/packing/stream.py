"""Planned micro-batches as a stream: read and collated one thread ahead of the training, in the order of the
plan, from any position on.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

import numpy as np
import torch

from lightning_fastft.packing.collate import Document, PackedBatch, collate
from lightning_fastft.packing.planner import EpochPlan, StepPlan

# A pack without documents keeps ranks equal; it needs some token for a model to run on, and few cost least.
EMPTY_PACK_TOKENS = 8
# Batches that wait for the trainer: enough for a few slow reads, and little pinned memory.
NUM_AHEAD = 4
THREAD_NAME = "fastft-loader"

T = TypeVar("T")


class TokenizedDocuments(Protocol):
    """What the stream needs of a tokenised data set (packing/cache.py has the one that lies on disk)."""

    length_N: np.ndarray
    num_labelled_N: np.ndarray
    fingerprint: str

    @property
    def content_digest(self) -> str:
        """Digest of the tokens and of which are trained."""

    def __getitem__(self, number: int) -> Document: ...


class DocumentSubset:
    """Some documents of a tokenised data set, numbered from 0: the training or the held-out part.

    Args:
        documents: The whole data set.
        index_N: Numbers of the chosen documents, ascending, int64; None for all.
    """

    def __init__(self, documents: TokenizedDocuments, *, index_N: np.ndarray | None = None) -> None:
        self.documents = documents
        self.index_N = index_N
        self.length_N = np.asarray(
            documents.length_N if index_N is None else documents.length_N[index_N], dtype=np.int64
        )
        self.num_labelled_N = np.asarray(
            documents.num_labelled_N if index_N is None else documents.num_labelled_N[index_N], dtype=np.int64
        )

    def __len__(self) -> int:
        return len(self.length_N)

    def __getitem__(self, number: int) -> Document:
        return self.documents[int(number if self.index_N is None else self.index_N[number])]


class PlannedStream:
    """Yield the micro-batches of one rank from a global position to the end of that position's epoch.

    Args:
        subset: The documents that the plan numbers.
        plan: Who trains what; a pure function of the position.
        rank: This process among plan.world_size.
        start: Global position: micro-batches trained in all epochs so far.
        pad_to: Length of every pack in tokens; None for no padding.
        pad_token_id: Token id of the padding.
        weigh_by_window: True divides the loss by the labelled tokens of the accumulation window (training); False by
            the pack's own.
        repeat_first_epoch: True trains the order of epoch 0 in every epoch (``overfit_batches``).
    """

    def __init__(
        self,
        subset: DocumentSubset,
        plan: StepPlan,
        *,
        rank: int,
        start: int = 0,
        pad_to: int | None = None,
        pad_token_id: int = 0,
        weigh_by_window: bool = True,
        repeat_first_epoch: bool = False,
    ) -> None:
        self.subset = subset
        self.plan = plan
        self.rank = rank
        self.start = start
        self.pad_to = pad_to
        self.pad_token_id = pad_token_id
        self.weigh_by_window = weigh_by_window
        self.repeat_first_epoch = repeat_first_epoch

    def __len__(self) -> int:
        return self.plan.num_micro_batches - self.start % self.plan.num_micro_batches

    def __iter__(self) -> Iterator[PackedBatch]:
        epoch, begin = divmod(self.start, self.plan.num_micro_batches)
        epoch_plan = self.plan.epoch(0 if self.repeat_first_epoch else epoch)
        for micro_batch in range(begin, self.plan.num_micro_batches):
            yield self._collate(epoch_plan, micro_batch, index=epoch * self.plan.num_micro_batches + micro_batch)

    def _collate(self, epoch_plan: EpochPlan, micro_batch: int, *, index: int) -> PackedBatch:
        documents = [self.subset[number] for number in epoch_plan.documents(rank=self.rank, micro_batch=micro_batch)]
        return collate(
            documents,
            pad_to=self.pad_to if documents or self.pad_to is not None else EMPTY_PACK_TOKENS,
            pad_token_id=self.pad_token_id,
            num_items=float(epoch_plan.num_items_M[micro_batch]) if self.weigh_by_window else None,
            index=index,
        )


def _do_nothing() -> None:
    """Stand in for a call that nobody asked for."""


class PackedLoader:
    """Iterate over packed micro-batches; every iteration asks for a fresh stream, and only when its first batch is
    wanted.

    Trainers create iterators long before they use them, in part before the position of a checkpoint is known; a loader
    that starts late cannot start at the wrong place. No process is started: to fork one that has threads, as a rank
    has, can hang it.

    Args:
        open_stream: Returns the stream of the next iteration.
        num_batches: Micro-batches per epoch, the same on all ranks.
        num_workers: 0 reads and collates when a batch is asked for; any other number does so in one thread, up to four
            batches ahead.
        pin_memory: Put batches into pinned host memory.
        before_batch: Called before a batch is handed out, by the thread that asked for it.
        after_batch: Called when the batch behind it is asked for, by the thread that asks.
    """

    def __init__(
        self,
        open_stream: Callable[[], PlannedStream],
        *,
        num_batches: int,
        num_workers: int = 0,
        pin_memory: bool = False,
        before_batch: Callable[[], None] = _do_nothing,
        after_batch: Callable[[], None] = _do_nothing,
    ) -> None:
        self._open_stream = open_stream
        self._num_batches = num_batches
        self.num_workers = num_workers
        self.pin_memory = pin_memory
        self._before_batch = before_batch
        self._after_batch = after_batch

    def __len__(self) -> int:
        return self._num_batches

    def __iter__(self) -> Iterator[PackedBatch]:
        batches = iter(self._open_stream())
        if self.pin_memory and torch.cuda.is_available():
            batches = (batch.pin_memory() for batch in batches)
        elif self.pin_memory:
            warnings.warn("pin_memory=True has no effect: there is no CUDA device.", stacklevel=2)
        for batch in prefetch(batches) if self.num_workers else batches:
            self._before_batch()
            yield batch
            self._after_batch()


def prefetch(batches: Iterator[T], *, num_ahead: int = NUM_AHEAD) -> Iterator[T]:
    """Yield what an iterator yields, made by one thread that is at most num_ahead items in front.

    An error of the iterator is raised in its place, with its traceback. The thread ends when this generator is used up,
    closed or dropped, and at the latest before the interpreter is finalised.

    Args:
        batches: Used by the thread alone; none of its items is None.
        num_ahead: Items that wait to be taken, at least 1.

    Cost:
        About 20 microseconds of the thread that takes an item.

    Example:
        >>> list(prefetch(iter("abc")))
        ['a', 'b', 'c']
    """
    # Nothing else holds the executor: its thread ends when this generator is closed or dropped, after the items that
    # were asked for.
    executor = ThreadPoolExecutor(1, thread_name_prefix=THREAD_NAME, initializer=_same_device())
    waiting = deque(executor.submit(next, batches, None) for _ in range(num_ahead))
    while (batch := waiting.popleft().result()) is not None:
        waiting.append(executor.submit(next, batches, None))
        yield batch


def _same_device() -> Callable[[], None]:
    """Return what gives another thread the current CUDA device of this one, in whose context it pins."""
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return _do_nothing
    device = torch.cuda.current_device()
    return lambda: torch.cuda.set_device(device)


class ResumedLoader(PackedLoader):
    """A PackedLoader whose stream opens where a checkpoint left the run, which Lightning tells by these two methods.

    Without them it warns on every resume inside an epoch. The state is empty: the position is the data module's, and is
    applied once.
    """

    def state_dict(self) -> dict[str, Any]:
        """Return nothing."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take nothing up."""
