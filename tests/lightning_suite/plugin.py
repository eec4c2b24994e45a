"""A pytest plugin for Lightning's tests: our strategy by default, a limit on the time of each test, and a log
line per result.
"""

from __future__ import annotations

import faulthandler
import inspect
import json
import os
import re

import pytest

# Tests that name a strategy of several processes never meet that of one device, and starting processes is what takes
# long.
_SEVERAL_PROCESSES = re.compile(r"ddp_spawn|ddp_fork|ddp_notebook|fork|spawn")
# Files that somebody has to download first: checkpoints of old versions, MNIST.
_NEEDS_DOWNLOADS = re.compile(r"test_legacy_checkpoints\.py|helpers/test_datasets\.py")


def pytest_addoption(parser):
    group = parser.getgroup("lightning_suite")
    group.addoption(
        "--default-strategy",
        default="",
        help="What Trainer(strategy='auto') resolves to on one device; empty is Lightning's.",
    )
    group.addoption("--result-log", required=True, help="Takes one JSON line when a test starts and one when it ends.")
    group.addoption("--only", default="", help="A file with the node ids to run, one a line.")
    group.addoption("--skip", default="", help="A file with the node ids that have run already, one a line.")
    group.addoption(
        "--test-seconds",
        type=float,
        default=120.0,
        help="The process ends, with all stacks, when one test takes longer.",
    )


def pytest_configure(config):
    config.addinivalue_line("markers", "cloud: Lightning's own marker")
    config.addinivalue_line("markers", "flaky: Lightning's own marker, for tests that it repeats when they fail")
    # Standard error as it is before pytest takes it over: the stacks of a test that hangs must be seen.
    config.pluginmanager.register(_Recorder(config, os.dup(2)))
    if strategy := config.getoption("--default-strategy"):
        replace_default_strategy(strategy)


def replace_default_strategy(name):
    """Make strategy "auto" resolve to the strategy of that name wherever Lightning takes SingleDeviceStrategy, in
    this process.
    """
    from lightning.pytorch.strategies import SingleDeviceStrategy
    from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector

    import lightning_fastft  # noqa: F401 - registers the names

    choose = _AcceleratorConnector._choose_strategy

    def choose_ours(connector):
        chosen = choose(connector)
        return name if type(chosen) is SingleDeviceStrategy else chosen

    _AcceleratorConnector._choose_strategy = choose_ours


class _Recorder:
    """Selects tests, limits their time and writes their results."""

    def __init__(self, config, stderr):
        self._only = _read_ids(config.getoption("--only"))
        self._skip = _read_ids(config.getoption("--skip"))
        self._seconds = config.getoption("--test-seconds")
        self._log = open(config.getoption("--result-log"), "a", encoding="utf-8")  # noqa: SIM115 - closed at the end
        self._stderr = stderr
        self._pid = os.getpid()

    def _write(self, **line):
        # A test may fork: what the child does is no result.
        if os.getpid() == self._pid:
            self._log.write(json.dumps(line) + "\n")
            self._log.flush()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config, items):
        # Tests that Lightning itself repeats until they pass show nothing when they fail once.
        chosen = [item for item in items if item.get_closest_marker("flaky") is None and not _is_left_out(item)]
        if self._only:
            chosen = [item for item in chosen if item.nodeid in self._only]
        chosen = [item for item in chosen if item.nodeid not in self._skip]
        config.hook.pytest_deselected(items=[item for item in items if item not in set(chosen)])
        items[:] = chosen
        self._write(event="collected", tests=[item.nodeid for item in items])

    def pytest_collectreport(self, report):
        if report.failed:
            self._write(event="end", test=report.nodeid, outcome="failed", text=str(report.longrepr)[-4000:])

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item):
        self._write(event="start", test=item.nodeid)
        faulthandler.dump_traceback_later(self._seconds, exit=True, file=self._stderr)
        try:
            return (yield)
        finally:
            faulthandler.cancel_dump_traceback_later()

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self._write(
                event="end", test=report.nodeid, outcome="failed", when=report.when, text=str(report.longrepr)[-4000:]
            )
        elif report.when == "call" or report.skipped:
            self._write(event="end", test=report.nodeid, outcome=report.outcome)

    def pytest_unconfigure(self):
        self._log.close()


def _is_left_out(item):
    parameters = getattr(getattr(item, "callspec", None), "id", "")
    return _NEEDS_DOWNLOADS.search(item.nodeid) or _SEVERAL_PROCESSES.search(
        parameters or inspect.getsource(item.function)
    )


def _read_ids(path):
    if not path:
        return set()
    with open(path, encoding="utf-8") as lines:
        return set(lines.read().splitlines())
