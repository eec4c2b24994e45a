"""StopSignals: a signal is noted once, other people's handlers are kept, and only the main thread can take signals over."""

import os
import signal
import threading
from types import SimpleNamespace

import pytest

from lightning_fastft.checkpoint.stops import STOP_SIGNALS, StopSignals


@pytest.fixture(autouse=True)
def handlers():
    """Handlers as they were, at the end."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
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
