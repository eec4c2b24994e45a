"""Run the tokenisation of chunks in this process or in worker processes, with results in the order of the rows.

Each worker has its own tokenizer and gets one chunk at a time over a pipe. Workers are fresh interpreters, because a
fork of a process with threads (torch, tokenizers) can deadlock and would inherit the pipes of the other workers. A
worker ends when its pipe closes, however this process ends.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
import warnings
from collections import deque
from collections.abc import Generator, Iterator
from itertools import chain
from typing import IO

from lightning_fastft.core.errors import DataError
from lightning_fastft.packing.tokens.chunks import Chunk
from lightning_fastft.packing.tokens.tokenisation import ChunkResult, Setup, tokenize_chunk

# Seconds of tokenising in this process, after which workers take the rest. They need about as long to start, because
# each imports transformers, so that no data set takes twice the time of the better choice.
WORKERS_AFTER_S = 10.0
# A worker has the caller's sys.path, so that it finds the same modules and none in the current folder. The package's
# own __init__ imports torch and Lightning, which takes longer than all the rest: it runs only if code, such as the
# module of a tokenizer, reads a name of the package.
_PROGRAM = f"""
import sys
from importlib.util import find_spec, module_from_spec

sys.path[:] = sys.argv[1:]
spec = find_spec("{__name__.partition(".")[0]}")
package = sys.modules[spec.name] = module_from_spec(spec)


def run_init(name):
    if name.startswith("__"):
        raise AttributeError(name)
    del package.__getattr__
    spec.loader.exec_module(package)
    return getattr(package, name)


package.__getattr__ = run_init
from {__name__} import serve_chunks

serve_chunks()
"""


def run_chunks(chunks: Iterator[Chunk], *, setup: Setup, num_proc: int) -> Generator[ChunkResult, None, None]:
    """Yield the result of each chunk, in order.

    Chunks are read lazily. This process tokenises for ``WORKERS_AFTER_S`` seconds; then num_proc workers take the rest.
    num_proc 0 and 1 start no worker, and neither does, with a warning, a tokenizer that cannot be pickled.

    Raises:
        DataError: A worker process died.
    """
    formatter = setup.make_formatter()
    seconds = 0.0
    for chunk in chunks:
        if num_proc > 1 and seconds >= WORKERS_AFTER_S:
            pickled = _pickle_setup(setup)
            if pickled is not None:
                yield from _run_workers(chain([chunk], chunks), setup=pickled, num_proc=num_proc)
                return
            num_proc = 1
        begin = time.perf_counter()
        result = tokenize_chunk(chunk, formatter=formatter, options=setup.options)
        seconds += time.perf_counter() - begin
        yield result


def _run_workers(chunks: Iterator[Chunk], *, setup: bytes, num_proc: int) -> Iterator[ChunkResult]:
    workers: list[_Worker] = []
    try:
        workers.extend(_Worker() for _ in range(num_proc))
        # A worker reads its setup once it has imported transformers: all start before the first is waited for.
        for worker in workers:
            worker.send(setup)
        yield from _share_out(chunks, workers)
    finally:
        for worker in workers:
            worker.stop()


def _share_out(chunks: Iterator[Chunk], workers: list[_Worker]) -> Iterator[ChunkResult]:
    """Distribute chunks; read ahead, so that workers do not wait for the reader."""
    busy: deque[_Worker] = deque()
    idle = deque(workers)
    for chunk in chunks:
        result = None
        if not idle:
            worker = busy.popleft()
            result = worker.receive()
            idle.append(worker)
        worker = idle.popleft()
        worker.send(pickle.dumps(chunk))
        busy.append(worker)
        if result is not None:
            yield result
    while busy:
        yield busy.popleft().receive()


def _pickle_setup(setup: Setup) -> bytes | None:
    """Return the pickled setup; None, with a warning, if another interpreter cannot rebuild the tokenizer."""
    name = type(setup.tokenizer).__qualname__
    if type(setup.tokenizer).__module__ == "__main__":
        reason = "its class is defined in the script, which a worker does not run"
    else:
        try:
            return pickle.dumps(setup)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            reason = str(error)
    warnings.warn(
        f"{name} cannot be sent to worker processes ({reason}). Rows are tokenised in this process (num_proc=1).",
        stacklevel=2,
    )
    return None


class _Worker:
    """A process that tokenises one chunk at a time."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(  # noqa: S603 - this interpreter, with a function of this package
            [sys.executable, "-c", _PROGRAM, *sys.path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Tokenizer threads in several workers would compete for the same cores.
            env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
        )

    def send(self, content: bytes) -> None:
        """Send the pickled setup, or then a pickled chunk; block until the worker has read most of it."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(content)
            self._process.stdin.flush()
        except (BrokenPipeError, ConnectionResetError):
            raise self._death() from None

    def receive(self) -> ChunkResult:
        assert self._process.stdout is not None
        try:
            result = pickle.load(self._process.stdout)  # noqa: S301 - from a process that this one started
        except (EOFError, pickle.UnpicklingError):
            raise self._death() from None
        assert isinstance(result, ChunkResult)
        return result

    def stop(self) -> None:
        # The worker may be busy with a chunk that is no longer needed.
        self._process.kill()
        # Also close the pipes, and discard what they still hold.
        self._process.communicate()

    def _death(self) -> DataError:
        return DataError(
            f"A tokenisation worker died with exit code {self._process.wait()} (-9 usually means out of memory). Use "
            "num_proc=1 to see the error in this process, or fewer processes."
        )


def serve_chunks() -> None:
    """Run a worker: read chunks from stdin and write their results to stdout, until stdin closes."""
    # The parent process handles Ctrl-C of the terminal.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    requests = sys.stdin.buffer
    # Redirect stdout, so that prints of a tokenizer do not mix with the results.
    results: IO[bytes] = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    setup: Setup = pickle.load(requests)  # noqa: S301 - from the process that started this one
    formatter = setup.make_formatter()
    while True:
        try:
            chunk: Chunk = pickle.load(requests)  # noqa: S301 - from the process that started this one
        except EOFError:
            return
        try:
            pickle.dump(tokenize_chunk(chunk, formatter=formatter, options=setup.options), results)
            results.flush()
        except BrokenPipeError:
            # The parent process is gone. Skip the interpreter's final flush, which would fail too.
            os._exit(1)
