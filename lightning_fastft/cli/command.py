"""The ``fastft`` command: dispatch to subcommands, and turn errors into exit codes."""

from __future__ import annotations

import difflib
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import version
from typing import Any, TextIO

from lightning_fastft.cli.answers import explain_full_disk, explain_missing_files
from lightning_fastft.cli.mistakes import check_words
from lightning_fastft.cli.noise import without_noise
from lightning_fastft.cli.other_names import COMMANDS
from lightning_fastft.cli.phases import shown_phases
from lightning_fastft.cli.usage import HELP, USAGE, help_of
from lightning_fastft.cli.words import TRAINER_COMMANDS, config_names
from lightning_fastft.core.collection import paused_collection
from lightning_fastft.core.cores import FreeCores
from lightning_fastft.core.errors import FastFTError, OptionError, printable
from lightning_fastft.core.phases import LOGGER, phase

# libgomp's spin count, in iterations.
_SPIN_COUNT = "10000"
# Commands in which Lightning and ResumeGuard handle signals.
_TRAINING = (*TRAINER_COMMANDS, "demo", "bench")
# Commands that take the options of a config.
_CONFIGURED = (*TRAINER_COMMANDS, "data", "doctor", "plan", "demo")


def main(args: Sequence[str] | None = None) -> int:
    """Run the ``fastft`` command and return its exit status.

    Args:
        args: Words of the command line without the name of the program; None for those of this process.
    """
    try:
        return _answer(list(sys.argv[1:] if args is None else args))
    except BrokenPipeError:
        if not _is_closed(sys.stdout):
            raise
        # The reader had enough, as head has. What is left goes nowhere when Python ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


def _answer(words: list[str]) -> int:
    """Run the command; return the exit status, also for errors."""
    try:
        status = _run_shown(words)
        # A full disk or a closed pipe is met here, not when Python ends. A process may have no output at all.
        if sys.stdout is not None:
            sys.stdout.flush()
        return status
    except FastFTError as error:
        sys.stderr.write(f"error: {type(error).__name__}: {error}\n")
        return 1
    except KeyboardInterrupt:
        return _answer_interrupt()
    except SystemExit as stop:
        # Lightning ends an interrupted run with status 1.
        if not isinstance(stop.__context__, KeyboardInterrupt):
            raise
        return _answer_interrupt()
    # transformers raises either for a missing or damaged model folder.
    except (OSError, ValueError) as error:
        answer = explain_full_disk(error) or explain_missing_files(error)
        if not answer:
            raise
        sys.stderr.write(printable(answer, keeps_lines=True))
        return 1


def _run_shown(words: list[str]) -> int:
    if text := _answer_at_once(words):
        sys.stdout.write(text)
        return 0
    if words[0] in _CONFIGURED:
        check_words(words[0], words[1:])
    with without_noise(), shown_phases():
        return _run(words[0], words[1:])


def _is_closed(stream: TextIO) -> bool:
    """Return whether a stream is a pipe whose reader has ended."""
    poll = select.poll()
    poll.register(stream.fileno(), select.POLLOUT)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _answer_at_once(words: list[str]) -> str:
    """Return the answer to words that need no run: help, version, this machine; "" for others."""
    if not words or words[0] in ("-h", "--help"):
        return USAGE.format(configs=", ".join(config_names()))
    if words[0] in ("--version", "-V", "version"):
        return f"{version('lightning_fastft')}\n"
    if words[0] in (*HELP, *TRAINER_COMMANDS) and {"-h", "--help"} & set(words):
        return HELP.get(words[0]) or help_of(words[0])
    if words == ["doctor"]:
        from lightning_fastft.cli.machine import describe_machine

        return describe_machine()
    return ""


def _answer_interrupt() -> int:
    sys.stderr.write("interrupted\n")
    return 128 + signal.SIGINT


def _run(command: str, words: list[str]) -> int:
    if command in (*TRAINER_COMMANDS, *HELP):
        _bound_spinning()
        cores = FreeCores()
        with phase("importing"), paused_collection():
            run = _import_command(command)
        _use_free_cores(cores)
        if command in _TRAINING:
            return run(words)
        with _unwinding_at_signals():
            return run(words)
    alike = difflib.get_close_matches(command, (*TRAINER_COMMANDS, *HELP), n=1)
    near = COMMANDS.get(command.lower()) or next(iter(alike), "")
    advice = f" Did you mean {near}?" if near else ""
    if command == "predict":
        advice = " Predict in Python, with predict_paths: trainer.predict(tuner, data, ckpt_path=CHECKPOINT)."
    raise OptionError(f"Unknown command {command!r}.{advice} Allowed are {', '.join((*TRAINER_COMMANDS, *HELP))}.")


@contextmanager
def _unwinding_at_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise SystemExit, so that unfinished files are removed and child processes end."""

    def stop(number: int, _: Any) -> None:
        sys.stderr.write(f"stopped by {signal.Signals(number).name}\n")
        raise SystemExit(128 + number)

    # Ignored signals, as those of nohup, stay ignored. Other threads cannot install handlers.
    numbers = [
        number
        for number in (signal.SIGTERM, signal.SIGHUP)
        if threading.current_thread() is threading.main_thread() and signal.getsignal(number) is signal.SIG_DFL
    ]
    for number in numbers:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


def _import_command(command: str) -> Callable[[Sequence[str]], int]:
    """Return the function that runs a command; each has imports that the others do not need."""
    if command in TRAINER_COMMANDS:
        from lightning_fastft.cli.lightning_cli import FastFTCLI

        def run_trainer(words: Sequence[str]) -> int:
            FastFTCLI([command, *words])
            return 0

        return run_trainer
    # Each has a module of its name.
    run: Callable[[Sequence[str]], int] = getattr(import_module(f"lightning_fastft.cli.{command}"), f"run_{command}")
    return run


def _bound_spinning() -> None:
    """Let OpenMP's threads sleep after about 0.4 ms of waiting for each other, before torch starts them.

    By default they spin for about 13 ms, on cores that the thread they wait for needs if another process has its core:
    a step of small products took 1,025 ms on two busy cores with two threads, and 99 ms with one.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", _SPIN_COUNT)


def _use_free_cores(cores: FreeCores) -> None:
    """Give torch no more threads than cores are free, unless OMP_NUM_THREADS sets them."""
    torch = sys.modules.get("torch")
    if torch is None or "OMP_NUM_THREADS" in os.environ:
        return
    num_free, num_threads = cores.count(), torch.get_num_threads()
    if num_free < num_threads:
        torch.set_num_threads(num_free)
        LOGGER.info(f"torch uses {num_free} of {num_threads} threads: other cores are busy (OMP_NUM_THREADS sets them)")
