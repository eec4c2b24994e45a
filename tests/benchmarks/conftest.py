"""What benchmarks change in a process that they own is taken back where tests call them in one."""

import signal

import pytest


@pytest.fixture(autouse=True)
def signals_of_this_process():
    """Benchmarks end in order when they are asked to, and would end the process of the tests."""
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)
