"""Training data that is read as a stream: the same micro-batches on all ranks, and a position that resumes exactly.

Axes: M micro-batches of a window.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_fastft.checkpoint.lightning_internals import batch_progress, take_back_batches
from lightning_fastft.checkpoint.ranks import on_all_ranks
from lightning_fastft.core.errors import DataError, OptionError, ResumeError, printable
from lightning_fastft.packing.collate import PackedBatch, collate
from lightning_fastft.packing.document import Document
from lightning_fastft.packing.loader import pad_empty, prefetch
from lightning_fastft.packing.reading.streams import RowStream
from lightning_fastft.packing.rows.rejects import Reject
from lightning_fastft.packing.step_plan import window_items
from lightning_fastft.packing.tokens.chunks import Chunk
from lightning_fastft.packing.tokens.tokenisation import Setup
from lightning_fastft.packing.windows import (
    PACKS_AHEAD,
    ReadState,
    Window,
    digest_rows,
    is_plain,
    order_packs,
    read_first_chunk,
    read_windows,
)
from lightning_fastft.training.data.position import check_ranks_agree, compare_plans, from_plain, to_plain
from lightning_fastft.training.data.trainer_facts import check_limits, ends_by_count, repeats_first_epoch

# Increased whenever the same rows give different packs.
STREAM_VERSION = 1


class _Started(NamedTuple):
    """A window with yielded micro-batches: its beginning in the run, and in this rank's stream."""

    position: int
    begin: ReadState
    digest: str


class TrainingStream:
    """Yield packed micro-batches of a stream, pass after pass, equally many on every rank.

    The ranks exchange the labelled tokens of their packs once per look-ahead window, on the host: a window's loss is
    the mean over all ranks' tokens, as with planned data. A rank whose rows end first trains empty packs until the pass
    ends on all ranks.

    Args:
        stream: The rows.
        setup: Turns them into tokens.
        ranks: Number of ranks that train different data, and the index of this one.
        accumulate: Micro-batches of an accumulation window.
        seed: Determines the order of the packs of a window.
        num_proc: Processes that tokenise.
        num_workers: 0 reads and collates on request; any other number reads ahead in threads.
        pin_memory: Whether batches are pinned.
        max_reject_share: Largest allowed share of rejected rows.
        rejected_path: File of this rank's rejected rows; None for none.
        padding: The padding of packs, as ``collate`` takes it.

    Raises:
        DataError: The first rows cannot be trained, or ranks read different streams.
    """

    def __init__(
        self,
        stream: RowStream,
        *,
        setup: Setup,
        ranks: tuple[int, int],
        accumulate: int,
        seed: int,
        num_proc: int,
        num_workers: int,
        pin_memory: bool,
        max_reject_share: float,
        rejected_path: Path | None,
        padding: dict[str, Any],
    ) -> None:
        self.name = stream.name
        self._world_size, self._rank = ranks
        self._accumulate, self._seed, self._num_workers = accumulate, seed, num_workers
        self._pins_memory = pin_memory and torch.cuda.is_available()
        self._rejected_path, self._padding = rejected_path, padding
        self._max_tokens = setup.options.max_tokens
        self._has_state = stream.has_state
        first = read_first_chunk(stream, setup=setup)
        # Of the first rows; None if there are none.
        self.format = first.format
        self._first, self._setup = first, setup
        self._check_agreement(first)
        self._read_windows = functools.partial(
            read_windows,
            stream=stream.split(rank=self._rank, world_size=self._world_size),
            first=first._replace(rows=[]),
            setup=setup,
            num_proc=num_proc,
            num_packs=-(-PACKS_AHEAD // accumulate) * accumulate,
            max_reject_share=max_reject_share,
        )
        # The window of the position and later ones; empty before the first batch of a run.
        self._started: list[_Started] = []
        self._group: Any = None
        # Whether the file of rejected rows was begun in this run.
        self._keeps_rejects = self._has_told_rejects = False
        self._told_lost: set[str] = set()

    @functools.cached_property
    def is_plain(self) -> bool:
        """Whether the first rows are plain text, although there is a chat template; tokenizes them again."""
        return is_plain(self._first, setup=self._setup)

    def describe(self) -> dict[str, Any]:
        """Return the settings that a position depends on, under the names that a user sets."""
        return {
            "stream_version": STREAM_VERSION,
            "max_tokens": self._max_tokens,
            "seed": self._seed,
            "world_size": self._world_size,
            "accumulate_grad_batches": self._accumulate,
        }

    def state_dict(self, position: int) -> dict[str, Any]:
        """Return the position and the beginning of its window on every rank. All ranks must call this."""
        started = self._find(position)
        own = None if started is None else _to_plain(started)
        ranks = on_all_ranks(lambda: (self._rank, own), error=ResumeError, group=self._group)
        saved = [state for _, state in sorted(dict(ranks).items())]
        return {"micro_batches": position, "stream": self.describe(), "ranks": [] if None in saved else saved}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> int:
        """Restore the state of a checkpoint, and return its position.

        Raises:
            ResumeError: The checkpoint is of data that was read whole, or of a stream with other settings.
        """
        if "stream" not in state_dict:
            raise ResumeError(
                f"The checkpoint is of a run on data that was read whole, and {self.name} is a stream. Resume with the "
                "data of the checkpoint, or begin a new run from its weights without resuming."
            )
        changes, _ = compare_plans(state_dict["stream"], self.describe())
        if changes:
            raise ResumeError(
                f"The checkpoint is at micro-batch {state_dict['micro_batches']} of another stream: {changes}. Each "
                "rank has read its own shards and keeps its own position in them. Resume with the values of the "
                "checkpoint, or begin a new run from its weights without resuming."
            )
        ranks = state_dict["ranks"]
        self._started = [_from_plain(ranks[self._rank])] if ranks else []
        if self._started and not self._has_state:
            rank_zero_info(
                f"{self.name} has a shuffle buffer, which keeps no position: {self._started[0].begin.num_rows} rows "
                "are read again and skipped."
            )
        return int(state_dict["micro_batches"])

    def align(self, trainer: Trainer, position: int) -> int:
        """Return the position without the micro-batches of an unfinished accumulation window.

        Checkpoints hold no partial gradients, and an epoch that a hook ended leaves none, so these micro-batches are
        trained again.
        """
        take_back_batches(trainer, batch_progress(trainer).current.ready % self._accumulate)
        return position - position % self._accumulate

    def batches(self, position: int) -> Iterator[PackedBatch]:
        """Yield micro-batches from a position on, without end.

        Raises:
            DataError: The stream holds no usable example, or a rank cannot read it.
            ResumeError: The stream yields different rows than before the checkpoint.
        """
        world_size = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        if self._group is None and world_size > 1:
            # The exchange runs on the host, because it must not wait for the device.
            self._group = dist.new_group(backend="gloo")
        started = self._find(position) or _Started(0, ReadState(), "")
        self._started, self._keeps_rejects = [], self._keeps_rejects or position > 0
        state, number, expected = started.begin, started.position, started.digest
        while True:
            num_before = number
            for order, window, num_items_M in self._windows(state, number=number, expected=expected):
                self._started.append(_Started(number, window.begin, window.digest))
                self._write_rejects(window.rejects, is_new=number >= position and not window.begin.epoch)
                self._tell_lost(window.lost)
                yield from self._collate(order, window, num_items_M, number=number, skipped=max(0, position - number))
                number, expected = number + len(order), ""
            if number == num_before and not state.num_rows:
                raise DataError(f"{self.name[:1].upper()}{self.name[1:]} holds no usable example.")
            state, expected = ReadState(epoch=state.epoch + 1), ""
            rank_zero_info(f"{self.name} is exhausted; pass {state.epoch + 1} begins at micro-batch {number}.")

    def _windows(
        self, begin: ReadState, *, number: int, expected: str
    ) -> Iterator[tuple[np.ndarray, Window, np.ndarray]]:
        """Yield order, window and divisors of the windows of a pass, until it ends on all ranks."""
        windows = self._read_windows(begin)
        if self._num_workers:
            windows = prefetch(windows, num_ahead=1)
        nothing = Window(begin._replace(is_at_end=True, carried=()), [], [], [], {}, "", True)
        with closing(windows):  # type: ignore[type-var]
            while True:
                taken: list[Window] = []
                take = functools.partial(self._take, windows, default=nothing, expected=expected, taken=taken)
                shares = on_all_ranks(take, error=DataError, group=self._group)
                (window,) = taken
                # Ranks that share their data report the same packs.
                labelled_R = {rank: num_labelled for rank, num_labelled, _ in shares}
                if any(labelled_R.values()):
                    order = order_packs(labelled_R, accumulate=self._accumulate, seed=self._seed, number=number)
                    total_M = np.zeros(len(order))
                    for num_labelled in labelled_R.values():
                        total_M[: len(num_labelled)] += num_labelled
                    sizes = {"accumulate": self._accumulate, "world_size": self._world_size}
                    yield order, window, window_items(total_M[order], **sizes)
                    number, expected = number + len(order), ""
                if all(is_last for _, _, is_last in shares):
                    return

    def _take(
        self, windows: Iterator[Window], *, default: Window, expected: str, taken: list[Window]
    ) -> tuple[int, list[int], bool]:
        """Append the next window, and return its summary for the other ranks."""
        window = next(windows, default)
        _check_same(window, expected=expected, name=self.name)
        taken.append(window)
        return self._rank, window.num_labelled, window.is_last

    def _collate(
        self, order: np.ndarray, window: Window, num_items_M: np.ndarray, *, number: int, skipped: int
    ) -> Iterator[PackedBatch]:
        """Yield the micro-batches of a window, starting at the given one."""

        def make() -> Iterator[PackedBatch]:
            for place in range(skipped, len(order)):
                pack = int(order[place])
                documents: list[Document] = window.packs[pack] if pack < len(window.packs) else []
                padding = pad_empty(documents, self._padding)
                batch = collate(documents, num_items=float(num_items_M[place]), index=number + place, **padding)
                yield batch.pin_memory() if self._pins_memory else batch

        return prefetch(make()) if self._num_workers else make()

    def _find(self, position: int) -> _Started | None:
        """Return the window of a position, and drop those before it."""
        while len(self._started) > 1 and self._started[1].position <= position:
            self._started.pop(0)
        return self._started[0] if self._started else None

    def _write_rejects(self, rejects: list[Reject], *, is_new: bool) -> None:
        """Append rejected rows to their file, which a new run replaces; windows and passes read again add none."""
        path = self._rejected_path
        if path is None or not rejects or not is_new:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a" if self._keeps_rejects else "w", encoding="utf-8") as file:
            file.writelines(f"{reject.to_json()}\n" for reject in rejects)
        if not self._has_told_rejects:
            rank_zero_info(f"Rows of {self.name} are rejected, the first for: {rejects[0].reason}. They are in {path}")
        self._keeps_rejects = self._has_told_rejects = True

    def _tell_lost(self, lost: Mapping[str, str]) -> None:
        """Log what is lost of rows of rank 0, once in a run."""
        for what, first in lost.items():
            if what not in self._told_lost:
                rank_zero_info(f"Rows of {self.name}: {printable(what)}{f' (the first is {first})' if first else ''}")
                self._told_lost.add(what)

    def _check_agreement(self, first: Chunk) -> None:
        try:
            check_ranks_agree({"first rows": digest_rows(first)})
        except DataError as error:
            raise DataError(
                f"Ranks see different first rows of {self.name}. Give all of them the whole stream, not split by rank, "
                "and shuffle it with a seed."
            ) from error


def check_stream_run(trainer: Trainer | None, *, val_share: float, has_validation: bool) -> None:
    """Check that a run can train on a stream; warn of validation data that it would never read.

    Raises:
        OptionError: Its length is not known, or an option needs all examples or the length of an epoch.
    """
    if val_share:
        raise OptionError("val_share needs the number of examples, which is unknown for a stream. Give val_paths.")
    if trainer is None:
        return
    limit = trainer.limit_train_batches
    if repeats_first_epoch(trainer):
        raise OptionError("overfit_batches repeats the batches of an epoch, which a stream does not have. Remove it.")
    check_limits(trainer)
    if not ends_by_count(trainer):
        raise OptionError(
            "The length of an epoch of a stream is unknown. Say when the run ends: --trainer.max_steps N."
        )
    interval = trainer.val_check_interval
    if has_validation and isinstance(interval, float) and interval == 1.0 and not isinstance(limit, int):
        rank_zero_warn(
            "The validation data are never read: they wait for the end of an epoch, which a stream does not have. Give "
            "a number of micro-batches: --trainer.val_check_interval N."
        )


def _check_same(window: Window, *, expected: str, name: str) -> None:
    """Raise ResumeError if a window that was begun before the checkpoint holds other rows now."""
    if expected and window.digest != expected:
        raise ResumeError(
            f"{name} does not continue where the checkpoint was written: row {window.begin.num_rows + 1} and later "
            "rows give other tokens than before. The data, its order (a shuffle without a seed), the tokenizer or the "
            "options of the rows have changed. Resume with those of the checkpoint, or begin a new run from its "
            "weights without resuming."
        )


def _to_plain(started: _Started) -> dict[str, Any]:
    """Return a window's beginning as tensors and plain types, for a checkpoint."""
    begin = started.begin
    return {
        **begin._asdict(),
        "carried": [to_plain(document) for document in begin.carried],
        "rejects": dict(begin.rejects),
        "position": started.position,
        "digest": started.digest,
    }


def _from_plain(values: Mapping[str, Any]) -> _Started:
    """Return the window's beginning from the result of ``_to_plain``."""
    carried = tuple(from_plain(document) for document in values["carried"])
    begin = {name: values[name] for name in ReadState._fields} | {"carried": carried}
    return _Started(int(values["position"]), ReadState(**begin), str(values["digest"]))
