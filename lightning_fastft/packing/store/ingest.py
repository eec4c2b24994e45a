"""Ingest: tokenise all rows of a data set in one pass, and judge the data as a whole."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from io import BytesIO
from pathlib import Path
from typing import IO, TYPE_CHECKING

import numpy as np

from lightning_fastft.core.errors import DataError
from lightning_fastft.core.files import sync_file
from lightning_fastft.packing.images import ImageStore, find_image_offsets, write_images
from lightning_fastft.packing.reading.sources import REJECTED, Source
from lightning_fastft.packing.rows.formats import TUNERS
from lightning_fastft.packing.rows.rejects import EXTRA_COLUMN, Reject, name_reason
from lightning_fastft.packing.store.completion_store import CompletionStore, Segments, pack_completions
from lightning_fastft.packing.store.dataset import (
    DTYPES,
    FORMAT_VERSION,
    META,
    TokenizedDataset,
    digest_file,
    digest_meta,
    replace_file,
    write_beside,
    write_file,
)
from lightning_fastft.packing.store.report import IngestReport, render_counts
from lightning_fastft.packing.tokens.chat import BY_PROMPT, BY_SENTINEL
from lightning_fastft.packing.tokens.chunks import make_chunks
from lightning_fastft.packing.tokens.control_tokens import QUOTED_CONTROL
from lightning_fastft.packing.tokens.formatter import PLAIN_TEXT
from lightning_fastft.packing.tokens.spans import IN_PARTS
from lightning_fastft.packing.tokens.tokenisation import ABSENT_FIELDS, ChunkResult, Setup, describe_uniform_reject
from lightning_fastft.packing.tokens.workers import run_chunks

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# Notes on how rows were read, with nothing lost. Commands other than fastft data do not repeat them.
ROUTINE_NOTES = frozenset({BY_PROMPT, BY_SENTINEL, IN_PARTS, PLAIN_TEXT, ABSENT_FIELDS, QUOTED_CONTROL})
# Files that are written row by row.
_STREAMED = ("ids", "trained", "images")


class Ingest:
    """Process all rows in one pass: write tokens, collect rejects, count, and stop the run on invalid data."""

    def __init__(self, setup: Setup, *, max_reject_share: float, on_stop: Path | None) -> None:
        self.rejects: list[Reject] = []
        self._setup = setup
        self._max_reject_share = max_reject_share
        self._on_stop = on_stop
        self._report = IngestReport()
        self._notes: Counter[str] = Counter()
        self._first_places: dict[str, str] = {}
        self._first_reject = ""
        self._length: list[np.ndarray] = []
        self._num_labelled: list[np.ndarray] = []
        self._digest: list[np.ndarray] = []
        self._pending_bits = np.zeros(0, dtype=bool)
        # Bytes of each image, and the number of images of each example.
        self._image_sizes: list[int] = []
        self._image_counts: list[int] = []
        self._completions: list[Segments] = []

    def run(
        self, sources: list[Source], *, num_proc: int, target: Path | None, fingerprint: str, show_progress: bool
    ) -> TokenizedDataset:
        """Tokenise all sources and return the data set, stored in target, or in memory if target is None."""
        if target is None:
            buffers = {name: BytesIO() for name in _STREAMED}
            start_N1 = self._fill(sources, buffers, num_proc=num_proc, show_progress=show_progress)
            arrays = {name: np.frombuffer(file.getbuffer(), np.uint8) for name, file in buffers.items()}
            offsets, completions = self._find_other_arrays()
            return TokenizedDataset(
                id_T=arrays["ids"].view(DTYPES["ids"]),
                trained_bits=arrays["trained"],
                start_N1=start_N1,
                num_labelled_N=_join(self._num_labelled),
                report=self._report,
                fingerprint=fingerprint,
                images=ImageStore({"images": arrays["images"], **offsets}) if offsets else None,
                completions=CompletionStore(completions) if completions else None,
            )
        with write_beside(target) as part:
            with ExitStack() as stack:
                files = {name: stack.enter_context((part / f"{name}.bin").open("wb")) for name in _STREAMED}
                start_N1 = self._fill(sources, files, num_proc=num_proc, show_progress=show_progress)
                for file in files.values():
                    sync_file(file)
            offsets, completions = self._find_other_arrays()
            if not offsets:
                (part / "images.bin").unlink()
            write_file(part / "start.bin", start_N1.tobytes())
            write_file(part / "num_labelled.bin", _join(self._num_labelled).tobytes())
            for name, array in (*offsets.items(), *completions.items()):
                write_file(part / f"{name}.bin", array.tobytes())
            write_file(part / REJECTED, _render_rejects(self.rejects))
            names = (*DTYPES, *(ImageStore.DTYPES if offsets else ()), *completions)
            digests = {name: digest_file(part / name) for name in (*(f"{name}.bin" for name in names), REJECTED)}
            meta = {
                "version": FORMAT_VERSION,
                "fingerprint": fingerprint,
                "sha256": digests,
                "report": self._report.to_dict(),
            }
            write_file(part / META, json.dumps(meta | {"own_sha256": digest_meta(meta)}, indent=1).encode())
        return TokenizedDataset.open(target)

    def _find_other_arrays(self) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Return the offsets of images, and the arrays of completions; empty where there are none."""
        return find_image_offsets(self._image_sizes, count_N=self._image_counts), pack_completions(self._completions)

    def _fill(
        self, sources: list[Source], files: Mapping[str, IO[bytes]], *, num_proc: int, show_progress: bool
    ) -> np.ndarray:
        """Write ids, trained bits and images; return the offsets."""
        # Check tokenizer and template in this process before any worker starts.
        formatter = self._setup.make_formatter()
        chunks = make_chunks(sources, formatter=formatter, options=self._setup.options)
        # Results come in the order of the sources, and each source has one first chunk.
        entry, entries = 0, iter([source.entry for source in sources])
        per_entry = self._report.documents_per_entry = [0] * (1 + max(source.entry for source in sources))
        try:
            with (
                _progress(sources, is_shown=show_progress) as advance,
                closing(run_chunks(chunks, setup=self._setup, num_proc=num_proc)) as results,
            ):
                for result in results:
                    self._judge(result)
                    self._append(result, files)
                    entry = next(entries) if result.is_first else entry
                    per_entry[entry] += len(result.length_N)
                    advance(result.num_seen)
            files["trained"].write(np.packbits(self._pending_bits).tobytes())
            self._finish_report()
            self._check_whole()
        except DataError:
            if self._on_stop is not None:
                write_rejects(self._on_stop, self.rejects)
            raise
        return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(_join(self._length))])

    def _judge(self, result: ChunkResult) -> None:
        """Count the result of a chunk, and raise DataError if the run must stop."""
        report = self._report
        self.rejects.extend(result.rejects)
        if result.rejects and not self._first_reject:
            first = result.rejects[0]
            self._first_reject = f"{result.place(first.line)}: {name_reason(first.reason, first.detail)}"
        report.num_rows += result.num_seen
        _add(report.rows_per_source, result.source, result.num_seen)
        _add(report.rows_per_format, result.format or "none", result.num_seen)
        report.unread_columns = sorted(result.unread.union(report.unread_columns))
        for entry in result.rejects:
            _add(report.rejects, entry.reason, 1)
        report.num_blank_lines += result.counts["num_blank_lines"]
        report.num_too_long += result.counts["num_too_long"]
        report.num_truncated += result.counts["num_truncated"]
        report.num_split += result.counts["num_split"]
        report.num_dropped_pieces += result.counts["num_dropped_pieces"]
        self._notes.update(result.notes)
        for note, line in result.first_lines.items():
            self._first_places.setdefault(note, result.place(line))
        if result.longest[0] > report.longest:
            report.longest, report.longest_place = result.longest[0], result.place(result.longest[1])
        if result.highest_id[0] > report.highest_id:
            report.highest_id, report.highest_id_place = result.highest_id[0], result.place(result.highest_id[1])
        if result.impossible is not None:
            line, error = result.impossible
            raise DataError(
                f"{result.place(line)}: {error}.{_say_larger(self._setup.tokenizer, self._setup.vocab_size)}"
            )
        uniform = describe_uniform_reject(result)
        if uniform is not None:
            raise DataError(f"{uniform}. Check format and columns.{_say_where(self._on_stop)}")

    def _append(self, result: ChunkResult, files: Mapping[str, IO[bytes]]) -> None:
        files["ids"].write(result.id_T.tobytes())
        for images in result.images_N:
            self._image_sizes += write_images(files["images"], images)
            self._image_counts.append(len(images))
        self._completions += result.completions_N
        bits = np.concatenate([self._pending_bits, result.is_trained_T])
        num_whole = len(bits) - len(bits) % 8
        files["trained"].write(np.packbits(bits[:num_whole]).tobytes())
        self._pending_bits = bits[num_whole:]
        self._length.append(result.length_N)
        self._digest.append(result.digest_N)
        if len(result.length_N):
            start_N = np.cumsum(result.length_N) - result.length_N
            is_predicted = result.is_trained_T.astype(np.int64)
            is_predicted[start_N] = 0
            self._num_labelled.append(np.add.reduceat(is_predicted, start_N))

    def _finish_report(self) -> None:
        report = self._report
        length_N, digest_N = _join(self._length), np.concatenate([np.zeros(0, dtype=np.uint64), *self._digest])
        report.num_documents = len(length_N)
        report.num_tokens = int(length_N.sum())
        report.num_labelled = int(_join(self._num_labelled).sum())
        report.num_plain = self._notes[PLAIN_TEXT]
        report.num_duplicates = len(digest_N) - len(np.unique(digest_N))
        first = {note: f" (the first is {place})" for note, place in self._first_places.items()}
        report.notes = [f"{count} {note}{first.get(note, '')}" for note, count in sorted(self._notes.items()) if count]

    def _check_whole(self) -> None:
        """Raise DataError if the data as a whole cannot be trained on."""
        report, options = self._report, self._setup.options
        check_share_of_rejects(report, most=self._max_reject_share, written=self._on_stop, first=self._first_reject)
        if report.num_too_long and options.too_long == "refuse":
            has_completions = not TUNERS.keys().isdisjoint(report.rows_per_format)
            ways = (
                "use too_long='truncate' (cuts completions to equal shares)"
                if has_completions
                else "use too_long='truncate' (keeps the beginning) or too_long='split' (makes several examples)"
            )
            raise DataError(
                f"{report.num_too_long} of {report.num_rows} rows are longer than max_tokens={options.max_tokens}; the "
                f"longest has {report.longest} tokens ({report.longest_place}). Raise max_tokens to {report.longest}, "
                f"or {ways}."
            )
        if report.num_documents == 0:
            raise DataError(f"No example is left after validation: {report.render()}")


def _join(arrays: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype=np.int64), *arrays])


def _add(counts: dict[str, int], name: str, count: int) -> None:
    counts[name] = counts.get(name, 0) + count


def _say_where(path: Path | None) -> str:
    return "" if path is None else f" Rejected rows are in {path}."


def describe_lost(report: IngestReport) -> list[str]:
    """Return what was lost of the rows that were kept: columns, ends of long rows, and what notes tell."""
    lost = [f"columns that are not read: {', '.join(report.unread_columns)}"] if report.unread_columns else []
    if report.num_too_long:
        lost.append(
            f"{report.num_too_long} rows are longer than a pack: {report.num_truncated} truncated, {report.num_split} "
            f"split, {report.num_dropped_pieces} pieces without trained tokens dropped"
        )
    return lost + [note for note in report.notes if not any(routine in note for routine in ROUTINE_NOTES)]


def check_share_of_rejects(report: IngestReport, *, most: float, written: Path | None, first: str = "") -> None:
    """Raise DataError if a larger share of the rows is rejected than ``most``."""
    if report.reject_share <= most:
        return
    shown = f" The first is {first}." if first else ""
    hint = " Use extra_columns='ignore' to accept unexpected columns." if EXTRA_COLUMN in report.rejects else ""
    raise DataError(
        f"{report.num_rejected} of {report.num_rows} rows ({100 * report.reject_share:.2f} %) are rejected, "
        f"max_reject_share={most} allows {100 * most:g} %: {render_counts(report.rejects)}.{shown}"
        f"{_say_where(written)} Repair the rows or raise max_reject_share.{hint}"
    )


def check_highest_id(
    report: IngestReport, *, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int | None
) -> None:
    """Raise DataError if a token id is outside of the embedding."""
    if vocab_size is None or report.highest_id < vocab_size:
        return
    raise DataError(
        f"{report.highest_id_place}: token id {report.highest_id} is impossible: ids are 0 to {vocab_size - 1}, "
        f"because the embedding has {vocab_size} rows." + _say_larger(tokenizer, vocab_size)
    )


def _say_larger(tokenizer: PreTrainedTokenizerBase | None, vocab_size: int | None) -> str:
    if tokenizer is None or vocab_size is None or len(tokenizer) <= vocab_size:
        return ""
    return f" The tokenizer has {len(tokenizer)} tokens. Use the tokenizer of this model, or resize the embedding."


def write_rejects(path: Path, rejects: list[Reject]) -> None:
    """Write rejected.jsonl; replace an earlier file even if no row is rejected."""
    if rejects or path.exists():
        replace_file(path, _render_rejects(rejects))


def _render_rejects(rejects: list[Reject]) -> bytes:
    return "".join(f"{entry.to_json()}\n" for entry in rejects).encode()


@contextmanager
def _progress(sources: list[Source], *, is_shown: bool) -> Iterator[Callable[[int], None]]:
    """Yield a function that advances the progress bar on stderr by a number of rows, if the bar is shown."""
    if not is_shown:
        yield lambda num_rows: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("rows"),
        TimeElapsedColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("tokenise", total=sum(source.count_rows() for source in sources))
        yield lambda num_rows: progress.advance(task, num_rows)
        # Sources count lines, which are more than rows.
        progress.update(task, total=progress.tasks[task].completed)
