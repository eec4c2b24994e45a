"""Pack a stream of rows within look-ahead windows: rows for several packs are read ahead and packed together.

Axes: P packs of a window, M micro-batches of one rank, R ranks.
"""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import NamedTuple

import numpy as np

from lightning_fastft.core.errors import DataError
from lightning_fastft.packing.document import IGNORED_LABEL, Document
from lightning_fastft.packing.packs import pack_best_fit_decreasing
from lightning_fastft.packing.reading.sources import Source
from lightning_fastft.packing.reading.streams import RowStream
from lightning_fastft.packing.rows.formats import TUNERS, FormatOptions
from lightning_fastft.packing.rows.rejects import Reject, name_reason
from lightning_fastft.packing.step_plan import mix_bits
from lightning_fastft.packing.store.ingest import ROUTINE_NOTES, check_share_of_rejects
from lightning_fastft.packing.store.report import IngestReport
from lightning_fastft.packing.tokens.chunks import Chunk, learn_format, split_rows, take_first_rows
from lightning_fastft.packing.tokens.formatter import PLAIN_TEXT
from lightning_fastft.packing.tokens.tokenisation import ChunkResult, Setup, tokenize_chunk
from lightning_fastft.packing.tokens.workers import run_chunks

# Packs of a window on each rank: best fit over the rows of 64 packs fills them as well as over all rows.
PACKS_AHEAD = 64
# Rows per tokenised chunk. A window ends between two chunks.
CHUNK_ROWS = 64
# The share of rejected rows is computed over at least this many rows.
ENOUGH_ROWS = 1000


class ReadState(NamedTuple):
    """Beginning of a window: the state from which the rest of a pass is read again, bit for bit.

    Args:
        epoch: The pass over the stream, from 0.
        source: State of the stream; "" for its beginning, or if the stream keeps none.
        num_rows: Rows of this pass that this rank has read.
        carried: Documents that were read but not packed yet.
        rejects: Rejected rows of this pass by reason.
        is_at_end: Whether the stream has no more rows.
    """

    epoch: int = 0
    source: str = ""
    num_rows: int = 0
    carried: tuple[Document, ...] = ()
    rejects: Mapping[str, int] = {}
    is_at_end: bool = False


class Window(NamedTuple):
    """The packs of a window on one rank.

    Args:
        begin: The beginning of the window.
        packs: Documents of each pack, the most expensive pack first.
        num_labelled: Labelled tokens of each pack, without the first token of each document.
        rejects: Rows of the window that were rejected.
        lost: What was lost of the rows that were kept, with the first row where it is known.
        digest: Digest of the tokens and labels, in the order of the packs.
        is_last: Whether the pass has no other window on this rank.
    """

    begin: ReadState
    packs: list[list[Document]]
    num_labelled: list[int]
    rejects: list[Reject]
    lost: dict[str, str]
    digest: str
    is_last: bool


def read_first_chunk(stream: RowStream, *, setup: Setup) -> Chunk:
    """Return the first rows of a stream with the format that they show, which all chunks of the stream have.

    Raises:
        DataError: The stream has no rows, or rows of an unknown format, or of one that the tokenizer cannot encode.
        OptionError: The options do not fit the format, or rows have completions that are compared.
    """
    options = setup.options
    source = Source(
        stream.name,
        "",
        lambda _: stream.read(epoch=0, state="", num_behind=0),
        stream.columns,
        lambda: 0,
    )
    first = take_first_rows(source.read(None))
    format, expected = learn_format(source, first, options=options)
    if format in TUNERS:
        raise DataError(
            f"{stream.name} has rows of format {format}. Streaming supports only rows without completions. Load them "
            "without streaming."
        )
    if format is not None:
        setup.make_formatter().check_can_serve(format, file=stream.name)
    expected = expected if stream.is_uniform else None
    return Chunk(stream.name, format, expected, first, is_first=True, counts="row")


def is_plain(chunk: Chunk, *, setup: Setup) -> bool:
    """Return whether the valid rows of a chunk are plain text, although there is a chat template."""
    found = tokenize_chunk(chunk, formatter=setup.make_formatter(), options=setup.options)
    return 0 < found.num_seen - len(found.rejects) <= found.notes[PLAIN_TEXT]


def digest_rows(chunk: Chunk) -> str:
    """Return a digest of the rows, equal on ranks that read the same stream."""
    return hashlib.sha256(repr(chunk.rows).encode("utf-8", "backslashreplace")).hexdigest()


def read_windows(
    begin: ReadState,
    *,
    stream: RowStream,
    first: Chunk,
    setup: Setup,
    num_proc: int,
    num_packs: int,
    max_reject_share: float,
) -> Iterator[Window]:
    """Yield one rank's windows of a pass from a state on: ``num_packs`` packs each, and the remaining packs in the last
    ones.

    The fullest packs of a window are trained; documents of the others are carried into the next window.

    Args:
        begin: Where to begin.
        stream: The rows of this rank.
        first: As ``read_first_chunk``; only its format is read.
        setup: Turns rows into tokens.
        num_proc: Processes that tokenise.
        num_packs: Packs of a window.
        max_reject_share: Largest allowed share of rejected rows.

    Raises:
        DataError: A row has an impossible token id, is too long, or has images; or too many rows are rejected.

    Cost:
        Holds the tokens of about two windows: the one being read, and the one being trained.
    """
    max_tokens = setup.options.max_tokens
    states: deque[tuple[str, int]] = deque()
    chunks = _read_chunks(begin, stream=stream, first=first, states=states)
    with closing(run_chunks(chunks, setup=setup, num_proc=num_proc)) as results:
        state = begin
        while not (state.is_at_end and not state.carried):
            window_begin, documents, rejects = state, list(state.carried), list[Reject]()
            lost: dict[str, str] = {}
            num_tokens = sum(len(document.input_ids) for document in documents)
            while num_tokens < num_packs * max_tokens and not state.is_at_end:
                result = next(results, None)
                if result is None:
                    state = state._replace(is_at_end=True)
                else:
                    documents += _split_documents(result, options=setup.options)
                    num_tokens += len(result.id_T)
                    rejects += result.rejects
                    lost = _find_lost(result) | lost
                    source, num_rows = states.popleft()
                    counts = Counter(state.rejects) + Counter(reject.reason for reject in result.rejects)
                    state = state._replace(source=source, num_rows=num_rows, rejects=dict(counts))
                _check_rejects(state, rejects, max_share=max_reject_share)
            packs, carried = _choose_packs(documents, num_packs=num_packs, max_tokens=max_tokens)
            state = state._replace(carried=tuple(carried))
            yield Window(
                begin=window_begin,
                packs=packs,
                num_labelled=[
                    sum(int((document.labels[1:] != IGNORED_LABEL).sum()) for document in pack) for pack in packs
                ],
                rejects=rejects,
                lost=lost,
                digest=_digest(packs),
                is_last=state.is_at_end and not carried,
            )


def _find_lost(result: ChunkResult) -> dict[str, str]:
    """Return what was lost of the rows of a chunk, with the first row; "" where it is not known."""
    lost = dict.fromkeys((f"column {name!r} is not read" for name in sorted(result.unread)), "")
    if result.counts["num_truncated"]:
        lost["rows longer than a pack are truncated"] = ""
    if result.counts["num_split"]:
        lost["rows longer than a pack are split"] = ""
    return lost | {
        note: f"row {result.first_lines[note]}" if note in result.first_lines else ""
        for note, number in sorted(result.notes.items())
        if number and note not in ROUTINE_NOTES
    }


def _read_chunks(
    begin: ReadState, *, stream: RowStream, first: Chunk, states: deque[tuple[str, int]]
) -> Iterator[Chunk]:
    """Yield chunks of rows, and record the stream's state after each."""
    if begin.is_at_end:
        return
    rows = stream.read(epoch=begin.epoch, state=begin.source, num_behind=begin.num_rows)
    for chunk in split_rows(rows, num_rows=CHUNK_ROWS):
        states.append((stream.save(num_behind=chunk[-1].line), chunk[-1].line))
        yield first._replace(rows=chunk, is_first=False)


def _check_rejects(state: ReadState, rejects: list[Reject], *, max_share: float) -> None:
    """Stop where too many rows of the pass are rejected."""
    num_rows = state.num_rows if state.is_at_end else max(state.num_rows, ENOUGH_ROWS)
    report = IngestReport(num_rows=num_rows, rejects=dict(state.rejects))
    first = f"row {rejects[0].line}: {name_reason(rejects[0].reason, rejects[0].detail)}" if rejects else ""
    check_share_of_rejects(report, most=max_share, written=None, first=first)


def order_packs(window_R: Mapping[int, list[int]], *, accumulate: int, seed: int, number: int) -> np.ndarray:
    """Return the pack of each micro-batch of a window, the same on all ranks, int64, shape (M,).

    Missing packs of a rank are empty, so that all ranks train equally many. The packs of a micro-batch have similar
    costs, because every rank sorts its packs, the most expensive one first.
    """
    num_packs = max(map(len, window_R.values()))
    num_micro_batches = -(-num_packs // accumulate) * accumulate
    key_M = mix_bits(np.arange(num_micro_batches, dtype=np.uint64), seed=seed, stream=number)
    return np.argsort(key_M, kind="stable")


def _split_documents(result: ChunkResult, *, options: FormatOptions) -> Iterator[Document]:
    """Yield the examples of a chunk; refuse rows that streaming does not support."""
    if result.impossible is not None:
        line, error = result.impossible
        raise DataError(f"{result.place(line)}: {error}.")
    if result.counts["num_too_long"] and options.too_long == "refuse":
        num_tokens, line = result.longest
        raise DataError(
            f"{result.place(line)} has {num_tokens} tokens, and max_tokens is {options.max_tokens}. A stream cannot be "
            "searched for its longest row: use too_long='truncate' (keeps the beginning) or too_long='split' (makes "
            "several examples), or raise max_tokens."
        )
    if any(result.images_N):
        raise DataError(f"{result.source} has rows with images, which are not streamed. Load them without streaming.")
    start = 0
    for length in result.length_N.tolist():
        ids = result.id_T[start : start + length].astype(np.int64)
        yield Document(ids, np.where(result.is_trained_T[start : start + length], ids, IGNORED_LABEL))
        start += length


def _choose_packs(
    documents: list[Document], *, num_packs: int, max_tokens: int
) -> tuple[list[list[Document]], list[Document]]:
    """Return the fullest packs, the most expensive first, and the documents of the others in their order."""
    if not documents:
        return [], []
    length_N = np.array([len(document.input_ids) for document in documents], dtype=np.int64)
    packs = pack_best_fit_decreasing(length_N, max_tokens=max_tokens)
    fullest_P = np.argsort(-packs.sum_per_pack(length_N), kind="stable")
    cost_P = packs.sum_per_pack(length_N * length_N)
    chosen = sorted(fullest_P[:num_packs].tolist(), key=lambda number: (-cost_P[number], number))
    left = sorted(int(document) for number in fullest_P[num_packs:] for document in packs[int(number)])
    return [[documents[index] for index in packs[number]] for number in chosen], [documents[index] for index in left]


def _digest(packs: list[list[Document]]) -> str:
    digest = hashlib.sha256()
    for pack in packs:
        digest.update(f"{len(pack)}\n".encode())
        for document in pack:
            digest.update(f"{len(document.input_ids)}\n".encode())
            digest.update(document.input_ids.tobytes())
            digest.update(document.labels.tobytes())
    return digest.hexdigest()
