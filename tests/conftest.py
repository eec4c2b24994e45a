"""Shared test set-up: fixed seeds, one thread, offline hub, and a reason on every test that is skipped for want
of a device.
"""

import atexit
import gc
import multiprocessing
import os
import sys
import threading
from collections import Counter
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Threads that wait for each other on a busy machine make a tiny step fifty times slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Calls of kernels inside the package validate their arguments here too.
os.environ.setdefault("FASTFT_CHECK_KERNELS", "1")
# Otherwise a deprecated call of the package fails only where no earlier test of the process made it.
os.environ.setdefault("JSONARGPARSE_DEPRECATION_WARNINGS", "all")

import pytest
import torch
from _pytest.doctest import DoctestModule

# Triton reads this when it is imported: without a GPU, `pytest tests/kernels/triton_NAME.py` interprets the kernels.
if not torch.cuda.is_available() and any(Path(word).name.startswith("triton_") for word in sys.argv[1:]):
    os.environ.setdefault("TRITON_INTERPRET", "1")

from lightning_utilities.core.rank_zero import rank_zero_only

import tests.support.done_once  # noqa: F401 (before a test imports Lightning)
from tests.support.covering import keep_covering_cases

# What is imported until all tests are collected stays: a third of that time went into looking for garbage.
gc.disable()

# What ranks and workers are forked from has loaded these once; it is started by the first test that needs it.
multiprocessing.set_forkserver_preload(
    [
        "tests.support.two_ranks",
        "tests.strategies.strategy_worker",
        "lightning_fastft.training.fine_tuner",
        "transformers.modeling_utils",
        "peft",
    ]
)


@pytest.fixture(autouse=True)
def fixed_seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def no_process_group_is_left():
    """Lightning's DDP leaves its process group behind; the next test must not meet it."""
    yield
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.fixture(autouse=True)
def no_rank_is_left():
    """A trainer of another node would silence the warnings and loggers of later tests."""
    yield
    rank_zero_only.rank = 0


@pytest.fixture
def unprepared_models(monkeypatch):
    """Let models without packed attention take packed batches, in tests of other parts."""
    monkeypatch.setattr("lightning_fastft.packing.pack_mask._find_reader", lambda: "")


@pytest.fixture(autouse=True, scope="module")
def no_seed_is_left():
    """``seed_everything`` hands its seed to later processes in the environment: ranks of other tests would take it."""
    yield
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        os.environ.pop(name, None)


@pytest.fixture(autouse=True)
def no_watch_for_signals_is_left():
    """A thread that still waits for a signal would end the process in a later test."""
    yield
    assert "fastft-stop" not in {thread.name for thread in threading.enumerate()}


def in_one_process(item, *, is_grouped):
    """Name what one process of xdist runs in sequence.

    That is a file, or where tests are grouped (``--dist loadgroup``, tests on GPUs) the cases of a function, which
    share what they have compiled. There a slow case is alone, and tests that wait for others to leave a card are a file.
    """
    if not is_grouped or item.get_closest_marker("alone") or item.get_closest_marker("multi_gpu"):
        return str(item.path)
    name = item.name if item.get_closest_marker("slow") else item.name.partition("[")[0]
    return f"{item.path.name}::{name}"


@pytest.hookimpl(wrapper=True)
def pytest_collect_file():
    """Look for doctests in the package alone; in the files of tests that takes each process 2 s and finds none."""
    return [found for found in (yield) if not isinstance(found, DoctestModule)]


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config, items):
    is_grouped = config.getoption("loadgroup", False)
    # By identity: an item's hash is that of its name, to which xdist adds the group.
    unit_of = {id(item): in_one_process(item, is_grouped=is_grouped) for item in items}
    for item in items if is_grouped else ():
        item.add_marker(pytest.mark.xdist_group(unit_of[id(item)]))
    # Before -m selects.
    keep_covering_cases(
        [item for item in items if item.get_closest_marker("covering") and not item.get_closest_marker("fault")]
    )
    yield
    # What takes longest begins first; all else stays in its random order.
    seconds = Counter()
    for item in items:
        for marker in item.iter_markers("slow"):
            seconds[unit_of[id(item)]] += (*marker.args, marker.kwargs.get("seconds", 1))[0]
    items.sort(key=lambda item: -seconds[unit_of[id(item)]])
    num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for item in items:
        if item.get_closest_marker("gpu") and num_devices < 1:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        if item.get_closest_marker("multi_gpu") and num_devices < 2:
            item.add_marker(pytest.mark.skip(reason="needs two CUDA devices"))


@pytest.fixture(autouse=True, scope="module")
def frozen_modules():
    """Leave what has been imported so far out of garbage collections, which take half a second otherwise."""
    gc.collect()
    gc.freeze()


def pytest_collection_finish():
    gc.freeze()
    gc.enable()
    # Later than pytest's own collections at the end. Libraries that look for what leaks need it.
    atexit.register(gc.unfreeze)
