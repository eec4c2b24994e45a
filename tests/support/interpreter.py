"""A pytest plugin of the processes in which kernels are interpreted: their lanes, and what Triton's interpreter
repeats at every call, done once.
"""

import pytest
from triton.runtime import interpreter

import tests.support.bare_package  # noqa: F401 (before any test imports the package)


def pytest_configure():
    exchange_language_once_per_launch()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Put the tests of planted faults and their control into their lane, before pytest selects by marks."""
    for item in items:
        if item.originalname.endswith(("is_seen", "same_check_passes", "same_checks_pass")):
            item.add_marker(pytest.mark.fault)


def exchange_language_once_per_launch():
    """Let a launch exchange the functions of triton.language once for each module that its functions are from.

    The interpreter looks for what to exchange at every call of a function in a kernel, and finds nothing after the
    first one of a module: that took half of its time (measured with cProfile on ``triton_qk_rope.py``, Triton 3.9).
    """
    exchange, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    exchanged_modules = set()

    def exchange_once(function):
        module = id(function.__globals__)
        if module in exchanged_modules:
            return None
        exchanged_modules.add(module)
        return exchange(function)

    def launch_afresh(*arguments, **options):
        # What a launch has exchanged is put back at its end.
        exchanged_modules.clear()
        return launch(*arguments, **options)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = exchange_once, launch_afresh
