"""Tokenise rows without end in two worker processes, and write their process ids once they work: ``-m
tests.packing.endless_rows``.
"""

import itertools
import os
import signal

from lightning_fastft.packing.reading.text_files import RawRow
from lightning_fastft.packing.rows.formats import FormatOptions
from lightning_fastft.packing.tokens import workers
from lightning_fastft.packing.tokens.chunks import Chunk
from lightning_fastft.packing.tokens.tokenisation import Setup
from lightning_fastft.packing.tokens.workers import run_chunks
from tests.support.processes import children_of


def main():
    # Whoever started the tests may have it ignored, as nohup does.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    workers.WORKERS_AFTER_S = 1e-9
    setup = Setup(None, FormatOptions(max_tokens=8), None)
    rows = [RawRow(line, b'{"input_ids": [1, 2, 3]}') for line in range(1, 101)]
    chunks = (Chunk("rows", "input_ids", None, rows, False) for _ in itertools.count())
    for number, _ in enumerate(run_chunks(chunks, setup=setup, num_proc=2)):
        if number == 3:
            print(*children_of(os.getpid()), flush=True)


if __name__ == "__main__":
    main()
