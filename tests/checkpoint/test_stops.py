"""StopSignals: a signal is noted once, other people's handlers are kept, and only the main thread can take signals over."""

import os
import signal
import sys
import threading
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
    composed = SimpleNamespace(signal_handlers=[lambda *_: called.append("lightning"), lambda *_: called.append("user"), signal.SIG_DFL])
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
    before = {"notebook": signal.default_int_handler, "handler of the script": lambda *_: None, "ignored": signal.SIG_IGN}[name]
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


def test_run_that_was_stopped_exits_as_shells_expect(tmp_path):
    stopped = RunStopped(signal.SIGINT, step=3, path=tmp_path)
    assert (stopped.code, stopped.signal_name) == (130, "SIGINT")
