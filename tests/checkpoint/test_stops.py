"""StopSignals: a signal is noted once, other people's handlers are kept, and only the main thread can take
signals over.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from lightning_fastft.checkpoint import stops as stops_module
from lightning_fastft.checkpoint.stops import STOP_SIGNALS, RunStopped, StopSignals


@pytest.fixture(autouse=True)
def handlers():
    """Handlers as they were, at the end; Python's own for interrupts, which a shell's background has ignored."""
    before = {number: signal.getsignal(number) for number in (*STOP_SIGNALS, signal.SIGINT)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_first_signal_counts_and_others_do_nothing():
    stops = StopSignals()
    assert stops.install()
    assert stops.install()
    for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGUSR1):
        os.kill(os.getpid(), number)
        assert stops.received == signal.SIGUSR1


def test_handlers_of_others_are_called_but_for_those_to_ignore():
    called = []
    # As Lightning composes them.
    composed = SimpleNamespace(
        signal_handlers=[lambda *_: called.append("lightning"), lambda *_: called.append("user"), signal.SIG_DFL]
    )
    stops = StopSignals()
    original = signal.getsignal
    try:
        signal.getsignal = lambda number: composed
        stops.install((signal.SIGUSR1,), is_ignored=lambda handler: handler is composed.signal_handlers[0])
    finally:
        signal.getsignal = original
    os.kill(os.getpid(), signal.SIGUSR1)
    assert called == ["user"]
    assert stops.received == signal.SIGUSR1


def test_another_thread_cannot_take_signals_over():
    found = []
    thread = threading.Thread(target=lambda: found.append(StopSignals().install()))
    thread.start()
    thread.join()
    assert found == [False]


def test_first_interrupt_is_noted_and_answered_and_a_later_one_is_an_interrupt(monkeypatch, capfd):
    monkeypatch.setattr(stops_module, "_SAME_INTERRUPT_S", 0.0)
    stops = StopSignals()
    assert stops.install_interrupt("saved soon\n")
    assert stops.install_interrupt("saved soon\n")
    os.kill(os.getpid(), signal.SIGINT)
    assert stops.received == signal.SIGINT
    assert capfd.readouterr().err == "saved soon\n"
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)


def test_interrupt_that_a_launcher_hands_on_is_the_same_one(capfd):
    stops = StopSignals()
    stops.install_interrupt("saved soon\n")
    os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGINT)
    assert stops.received == signal.SIGINT
    assert capfd.readouterr().err == "saved soon\n"


@pytest.mark.parametrize("name", ["notebook", "handler of the script", "ignored"])
def test_interrupt_stays_what_it_is(monkeypatch, name):
    before = {
        "notebook": signal.default_int_handler,
        "handler of the script": lambda *_: None,
        "ignored": signal.SIG_IGN,
    }[name]
    signal.signal(signal.SIGINT, before)
    if name == "notebook":
        # IPython and its kernels set it, as Python's own prompt does.
        monkeypatch.setattr(sys, "ps1", "In : ", raising=False)
    assert not StopSignals().install_interrupt("")
    assert signal.getsignal(signal.SIGINT) is before


def test_forked_worker_of_a_loader_goes_on_after_an_interrupt(capfd):
    stops = StopSignals()
    assert stops.install_interrupt("saved soon\n")
    child = os.fork()
    if child == 0:
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGINT)
        os._exit(7 if stops.received == 0 else 8)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert capfd.readouterr().err == ""


ROOT = Path(__file__).parents[2]
HUNG = """
import ctypes, os, signal, sys
import tests.support.bare_package
from lightning_fastft.checkpoint.stops import StopSignals
stops = StopSignals()
stops.install()
stops.watch(float(sys.argv[1]))
print("ready", flush=True)
if sys.argv[2] == "hung":
    # In C, as a rank in a collective that nobody answers: no handler of Python runs meanwhile.
    library, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)
if sys.argv[2] == "child":
    child = os.fork()
    if child == 0:
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(0)
    os.waitpid(child, 0)
    sys.stdin.read()
while not stops.received and sys.argv[2] == "lively":
    pass
if sys.argv[2] == "lively":
    for _ in range(200_000):
        stops.note_progress()
stops.unwatch()
"""


def run_watched(limit_s, kind):
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", HUNG, str(limit_s), kind],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "ready\n"
    return process


def test_hung_process_ends_after_a_signal_with_its_code_and_its_stacks():
    process = run_watched(1.0, "hung")
    process.send_signal(signal.SIGTERM)
    said = process.communicate(timeout=120)[1]
    assert process.returncode == 143
    assert "SIGTERM" in said
    assert "most recent call first" in said


class Wakeup(contextlib.nullcontext):
    """A socket that answers by a script, in place of a clock."""

    def __init__(self, answers):
        super().__init__()
        self.answers = iter(answers)

    def settimeout(self, limit_s):
        pass

    def recv(self, num_bytes):
        return next(self.answers)()


class EndedError(Exception):
    pass


def test_progress_and_saves_put_the_end_of_a_hung_process_off():
    seen = []

    class Stops(StopSignals):
        def _end(self, number, limit_s):
            raise EndedError

    def passes(*notes):
        def answer():
            seen.extend(note.__name__ for note in notes)
            for note in notes:
                note()
            raise TimeoutError

        return answer

    stops = Stops()
    answers = [lambda: bytes([signal.SIGTERM]), passes(stops.note_progress), passes(stops.note_save), passes()]
    with pytest.raises(EndedError):
        stops._end_if_hung(Wakeup([*answers, passes(stops.note_progress), passes()]), 1.0)
    assert seen == ["note_progress", "note_save", "note_progress"]


def test_process_that_goes_on_is_not_ended():
    process = run_watched(1.0, "lively")
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=120)[1] == ""
    assert process.returncode == 0


def test_signal_of_a_forked_child_is_not_one_of_this_process():
    process = run_watched(1.0, "child")
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=4)
    assert process.communicate("", timeout=120)[1] == ""
    assert process.returncode == 0


def test_run_that_was_stopped_exits_as_shells_expect(tmp_path):
    stopped = RunStopped(signal.SIGINT, step=3, path=tmp_path)
    assert (stopped.code, stopped.signal_name) == (130, "SIGINT")
