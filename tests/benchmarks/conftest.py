"""What benchmarks change in a process that they own is taken back where tests call them in one."""

import signal

import pytest

from benchmarks.ruler.arms import plain


@pytest.fixture(autouse=True)
def signals_of_this_process():
    """Benchmarks end in order when they are asked to, and would end the process of the tests."""
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)


@pytest.fixture
def idle_optimizer(monkeypatch):
    """Plant the fault of a plain arm whose optimizer does nothing."""
    own = plain.make_optimizer

    def make_optimizer(parameters, **options):
        optimizer = own(parameters, **options)
        optimizer.step = lambda: None
        return optimizer

    monkeypatch.setattr(plain, "make_optimizer", make_optimizer)
