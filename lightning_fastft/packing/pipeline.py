"""Rows become tokens in chunks: in this process or in several, with results in the order of the rows.

Worker processes hold a tokenizer of their own and are handed one chunk at a time over a pipe, so nothing is shared and
nothing can block. They are fresh interpreters: a fork of a process with threads (of torch, of the tokenizers) can hang,
and would hold the pipes of the other workers open. A worker ends when its pipe does, in whatever way this process ends.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import signal
import subprocess
import sys
import warnings
from collections import Counter, deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import numpy as np

from lightning_fastft.core.errors import DataError
from lightning_fastft.packing.formats import (
    COLUMNS,
    Encoded,
    FormatOptions,
    Formatter,
    TokenIdError,
    detect_format,
    find_wrong_mapping,
)
from lightning_fastft.packing.report import render_counts
from lightning_fastft.packing.rows import (
    Raw,
    Reject,
    RowRejectedError,
    check_token_counts,
    make_reject,
    parse_row,
    take_columns,
)
from lightning_fastft.packing.sources import RawRow, Source

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# The rows of a file that tell its format and its columns, and that stop the run when all of them are rejected for one
# reason.
PEEK_ROWS = 100
_CHUNK_ROWS = 256
_CHUNK_BYTES = 2**22
ABSENT_FIELDS = (
    "rows with nulls inside messages or tools, as columns of a table fill fields that a row does not "
    "have; "
    "they are dropped"
)
# Below this, some 4,000 rows, workers take longer to start (they import torch) than this process takes for the rows.
CHUNKS_ENOUGH = 16
# A column in fewer of the first rows than this does not belong to the file, where there are rows enough to tell.
_COLUMN_ROWS = 2
_ROWS_ENOUGH = 10


class Setup(NamedTuple):
    """What a worker needs to turn rows into tokens."""

    tokenizer: PreTrainedTokenizerBase | None
    options: FormatOptions
    vocab_size: int | None


class Chunk(NamedTuple):
    """Consecutive rows of one source."""

    source: str
    format: str | None
    expected: frozenset[str] | None
    rows: list[RawRow]
    is_first: bool
    counts: str = "line"


class ChunkResult(NamedTuple):
    """What became of a chunk: tokens one behind the other, rejects in row order, and counts by name.

    num_seen counts rows; blank lines are in counts. digest_N has one number per accepted row, before any cut. An
    impossible token id ends the chunk. first_lines has the first line of a note that concerns single rows; counted says
    whether such a number counts lines or rows.
    """

    source: str
    format: str | None
    is_first: bool
    num_seen: int
    id_T: np.ndarray
    is_trained_T: np.ndarray
    length_N: np.ndarray
    digest_N: np.ndarray
    rejects: list[Reject]
    counts: Counter[str]
    notes: Counter[str]
    first_lines: dict[str, int]
    longest: tuple[int, int]
    highest_id: tuple[int, int]
    impossible: tuple[int, TokenIdError] | None
    counted: str

    def place(self, number: int) -> str:
        """Return where a row is: "a.jsonl, line 3", or "a.json, row 3" for elements of an array, tables and lists."""
        return f"{self.source}, {self.counted} {number}"


def make_chunks(sources: Iterable[Source], *, formatter: Formatter, options: FormatOptions) -> Iterator[Chunk]:
    """Yield the rows of all sources in chunks; the first chunk of a source is its first 100 rows, which tell format and
    columns.

    Args:
        sources: What to read.
        formatter: Says which formats can be served with this tokenizer.
        options: A forced format and a column mapping.

    Raises:
        DataError: A source has no rows, or no known format, or one that cannot be served.
    """
    for source in sources:
        wanted = None
        if source.columns is not None:
            names = {name for required, optional in COLUMNS.values() for name in required + optional}
            wanted = frozenset((options.columns or {}).get(name, name) for name in names) | names
        rows = source.read(wanted)
        first = _take_first_rows(rows)
        format, expected = _learn_format(source, first, options=options)
        if format is not None:
            formatter.check_can_serve(format, file=source.name)
        yield Chunk(source.name, format, expected, first, True, source.counts)
        for more in _split_rows(rows):
            yield Chunk(source.name, format, expected, more, False, source.counts)


def _take_first_rows(rows: Iterator[RawRow]) -> list[RawRow]:
    first, num_rows = [], 0
    for row in rows:
        first.append(row)
        num_rows += row.raw is not None
        if num_rows == PEEK_ROWS:
            break
    return first


def _split_rows(rows: Iterator[RawRow]) -> Iterator[list[RawRow]]:
    chunk: list[RawRow] = []
    num_bytes = 0
    for row in rows:
        chunk.append(row)
        num_bytes += len(row.raw) if isinstance(row.raw, bytes) else 0
        if len(chunk) == _CHUNK_ROWS or num_bytes > _CHUNK_BYTES:
            yield chunk
            chunk, num_bytes = [], 0
    if chunk:
        yield chunk


def _learn_format(
    source: Source, first: list[RawRow], *, options: FormatOptions
) -> tuple[str | None, frozenset[str] | None]:
    """Return the format of most of the first rows, and the columns that rows of this source have (None for no
    check).
    """
    raws = [row.raw for row in first if row.raw is not None]
    if not raws:
        raise DataError(f"{source.name} is empty: no row in {len(first)} {source.counts}s.")
    if source.columns is not None:
        _check_mapping(source.name, source.columns, options=options)
        return _known_format(source.name, detect_format(source.columns, options=options), source.columns), None
    parsed = [columns for raw in raws if (columns := _columns_of(raw)) is not None]
    if not parsed and len(raws) < PEEK_ROWS:
        # Every row is rejected for a reason of its own, and there are no more.
        return None, None
    votes = Counter(format for columns in parsed if (format := detect_format(columns, options=options)) is not None)
    counts = Counter(column for columns in parsed for column in columns)
    format = votes.most_common(1)[0][0] if votes else None
    if parsed:
        _check_mapping(source.name, list(counts), options=options)
        format = _known_format(source.name, format, [column for column, _ in counts.most_common(20)])
    if options.extra_columns == "ignore":
        return format, None
    least = _COLUMN_ROWS if len(parsed) >= _ROWS_ENOUGH else 1
    return format, frozenset(column for column, count in counts.items() if count >= least)


def _known_format(name: str, format: str | None, columns: Iterable[str]) -> str:
    if format is not None:
        return format
    formats = "; ".join(f"{format}: {', '.join(required)}" for format, (required, _) in COLUMNS.items())
    raise DataError(
        f"{name} has the columns {', '.join(sorted(columns))}, which make no known format ({formats}). "
        'Map them, for example columns={"prompt": "question", "completion": "answer"}, on the command line '
        "--data.columns.prompt question --data.columns.completion answer."
    )


def _check_mapping(name: str, columns: Sequence[str], *, options: FormatOptions) -> None:
    wrong = find_wrong_mapping(columns, options=options)
    if wrong:
        raise DataError(f"{name}: {wrong}")


def _columns_of(raw: Raw) -> frozenset[str] | None:
    try:
        return frozenset(parse_row(raw))
    except RowRejectedError:
        return None


def tokenize_chunk(chunk: Chunk, *, formatter: Formatter, options: FormatOptions) -> ChunkResult:
    """Judge the rows of a chunk and turn the good ones into tokens.

    Args:
        chunk: Rows of one source and their format.
        formatter: Turns rows into tokens; its notes are taken along and set back.
        options: What happens to rows that are too long.
    """
    # Rows are told apart by their place here: those of a JSON array may share a line.
    read = [row for row in chunk.rows if row.raw is not None]
    taken: list[int] = []
    rows: list[dict[str, Any]] = []
    rejected: dict[int, Reject] = {}
    required, optional = COLUMNS[chunk.format] if chunk.format is not None else ((), ())
    counts: Counter[str] = Counter(num_blank_lines=len(chunk.rows) - len(read))
    notes: Counter[str] = Counter()

    def reject(place: int, error: RowRejectedError) -> None:
        rejected[place] = make_reject(error, file=chunk.source, line=read[place].line, raw=read[place].raw or b"")

    for place, (_, raw, num_absent) in enumerate(read):
        notes[ABSENT_FIELDS] += num_absent > 0
        try:
            row = parse_row(raw or b"")
            rows.append(
                take_columns(
                    row, required=required, optional=optional, mapping=options.columns or {}, expected=chunk.expected
                )
            )
            taken.append(place)
        except RowRejectedError as error:
            reject(place, error)
    outcomes = formatter.encode(rows, format=chunk.format) if chunk.format is not None else []

    kept: list[Encoded] = []
    digests: list[int] = []
    first_lines: dict[str, int] = {}
    longest = highest = (-1, 0)
    impossible = None
    for place, outcome in zip(taken, outcomes):
        line = read[place].line
        try:
            if isinstance(outcome, RowRejectedError):
                raise outcome
            if isinstance(outcome, TokenIdError):
                impossible = (line, outcome)
                break
            check_token_counts(num_tokens=len(outcome.input_ids), num_labelled=int(outcome.is_trained[1:].sum()))
            longest = max(longest, (len(outcome.input_ids), line), key=lambda pair: pair[0])
            kept.extend(_fit(outcome, options=options, counts=counts))
        except RowRejectedError as error:
            reject(place, error)
            continue
        for note in outcome.notes:
            notes[note] += 1
            first_lines.setdefault(note, line)
        digests.append(_digest(outcome))
        highest = max(highest, (int(outcome.input_ids.max()), line), key=lambda pair: pair[0])
    notes += formatter.notes
    formatter.notes.clear()
    return ChunkResult(
        source=chunk.source,
        format=chunk.format,
        is_first=chunk.is_first,
        num_seen=len(read),
        id_T=np.concatenate([np.zeros(0, np.int32), *(example.input_ids.astype(np.int32) for example in kept)]),
        is_trained_T=np.concatenate([np.zeros(0, bool), *(example.is_trained for example in kept)]),
        length_N=np.asarray([len(example.input_ids) for example in kept], dtype=np.int64),
        digest_N=np.asarray(digests, dtype=np.uint64),
        rejects=[rejected[place] for place in sorted(rejected)],
        counts=counts,
        notes=notes,
        first_lines=first_lines,
        longest=longest,
        highest_id=highest,
        impossible=impossible,
        counted=chunk.counts,
    )


def _digest(example: Encoded) -> int:
    digest = hashlib.blake2b(example.input_ids.tobytes() + example.is_trained.tobytes(), digest_size=8)
    return int.from_bytes(digest.digest(), "little")


def _fit(example: Encoded, *, options: FormatOptions, counts: Counter[str]) -> list[Encoded]:
    """Return the example, its beginning or its pieces, as the option for long examples has it."""
    most = options.max_tokens
    if len(example.input_ids) <= most:
        return [example]
    counts["num_too_long"] += 1
    if options.too_long == "refuse":
        # The run stops once all are counted; tokens are not kept for it.
        return []
    if options.too_long == "truncate":
        head = Encoded(example.input_ids[:most], example.is_trained[:most])
        check_token_counts(num_tokens=most, num_labelled=int(head.is_trained[1:].sum()), is_truncated=True)
        counts["num_truncated"] += 1
        return [head]
    counts["num_split"] += 1
    cuts = range(0, len(example.input_ids), most)
    pieces = [
        Encoded(example.input_ids[begin : begin + most], example.is_trained[begin : begin + most]) for begin in cuts
    ]
    trained = [piece for piece in pieces if piece.is_trained[1:].any()]
    counts["num_dropped_pieces"] += len(pieces) - len(trained)
    return trained


def run_chunks(chunks: Iterator[Chunk], *, setup: Setup, num_proc: int) -> Generator[ChunkResult, None, None]:
    """Yield the result of each chunk, in order.

    Args:
        chunks: Made as they are needed.
        setup: Goes to each worker once.
        num_proc: Worker processes; 0 and 1 work in this process, and so does a tokenizer that cannot be pickled into
            another one, with a warning.

    Raises:
        DataError: A worker ended before its work was done.
    """
    if num_proc <= 1:
        formatter = Formatter(setup.tokenizer, options=setup.options, vocab_size=setup.vocab_size)
        for chunk in chunks:
            yield tokenize_chunk(chunk, formatter=formatter, options=setup.options)
        return
    head = list(islice(chunks, CHUNKS_ENOUGH))
    pickled = _pickle_setup(setup) if len(head) == CHUNKS_ENOUGH else None
    if pickled is None:
        yield from run_chunks(chain(head, chunks), setup=setup, num_proc=0)
        return
    workers = [_Worker(pickled) for _ in range(num_proc)]
    try:
        yield from _share_out(chain(head, chunks), workers)
    finally:
        for worker in workers:
            worker.stop()


def _share_out(chunks: Iterator[Chunk], workers: list[_Worker]) -> Iterator[ChunkResult]:
    """Hand chunks round; the next one is made before a result is waited for, so that a worker does not wait for
    the reader.
    """
    busy: deque[_Worker] = deque()
    idle = deque(workers)
    for chunk in chunks:
        result = None
        if not idle:
            worker = busy.popleft()
            result = worker.receive()
            idle.append(worker)
        worker = idle.popleft()
        worker.send(chunk)
        busy.append(worker)
        if result is not None:
            yield result
    while busy:
        yield busy.popleft().receive()


def _pickle_setup(setup: Setup) -> bytes | None:
    """Return the setup for workers; None, with a warning, where another interpreter cannot make the tokenizer again."""
    name = type(setup.tokenizer).__qualname__
    if type(setup.tokenizer).__module__ == "__main__":
        reason = "its class is defined in the script, which a worker does not run"
    else:
        try:
            return pickle.dumps(setup)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            reason = str(error)
    warnings.warn(
        f"{name} cannot be sent to worker processes ({reason}): rows are tokenised in this one, as with num_proc=1.",
        stacklevel=2,
    )
    return None


class _Worker:
    """A process that tokenises one chunk at a time."""

    def __init__(self, setup: bytes) -> None:
        # The path of this process, so that the same modules are found and none in the folder that happens to be the
        # current one.
        program = f"import sys; sys.path[:] = sys.argv[1:]; from {__name__} import serve_chunks; serve_chunks()"
        self._process = subprocess.Popen(  # noqa: S603 - this interpreter, with a function of this package
            [sys.executable, "-c", program, *sys.path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Threads inside one of several workers would only fight for the same cores.
            env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
        )
        self._send(setup)

    def send(self, chunk: Chunk) -> None:
        self._send(pickle.dumps(chunk))

    def receive(self) -> ChunkResult:
        assert self._process.stdout is not None
        try:
            result = pickle.load(self._process.stdout)  # noqa: S301 - of a process that this one started
        except (EOFError, pickle.UnpicklingError):
            raise self._death() from None
        assert isinstance(result, ChunkResult)
        return result

    def stop(self) -> None:
        # A worker that is busy with a chunk nobody wants any more is ended.
        self._process.kill()
        # Closes the pipes as well; what they still hold is for nobody.
        self._process.communicate()

    def _send(self, content: bytes) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(content)
            self._process.stdin.flush()
        except (BrokenPipeError, ConnectionResetError):
            raise self._death() from None

    def _death(self) -> DataError:
        return DataError(
            f"A process that tokenises ended with exit code {self._process.wait()} (-9 is mostly want of memory; a "
            "traceback stands above if there "
            "was one). Use num_proc=1 to see the error in this process, or fewer processes."
        )


def serve_chunks() -> None:
    """Be a worker: answer each chunk on stdin with its result on stdout, until stdin ends."""
    # The Ctrl-C of a terminal is for the process that started this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    requests = sys.stdin.buffer
    # What a tokenizer prints must not get between the results; the pipe has another descriptor from here on.
    results: IO[bytes] = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    setup: Setup = pickle.load(requests)  # noqa: S301 - of the process that started this one
    formatter = Formatter(setup.tokenizer, options=setup.options, vocab_size=setup.vocab_size)
    while True:
        try:
            chunk: Chunk = pickle.load(requests)  # noqa: S301 - of the process that started this one
        except EOFError:
            return
        try:
            pickle.dump(tokenize_chunk(chunk, formatter=formatter, options=setup.options), results)
            results.flush()
        except BrokenPipeError:
            # The process that asked is gone; flushing once more at the end would fail as well.
            os._exit(1)


def describe_uniform_reject(result: ChunkResult) -> str | None:
    """Return the text that stops a run whose first 100 rows of a file were all rejected for one reason; None
    where they were not.
    """
    if not result.is_first or result.num_seen < PEEK_ROWS or len(result.rejects) < result.num_seen:
        return None
    reasons = Counter(entry.reason for entry in result.rejects)
    if len(reasons) > 1:
        return None
    first = result.rejects[0]
    return (
        f"{result.source}: all of the first {result.num_seen} rows are rejected ({render_counts(reasons)}); "
        f"{result.counted} {first.line}: {first.detail}"
    )
