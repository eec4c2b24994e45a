"""Whether the device waits for the host: what marks say of a simulated device, and what recorded layers make of it."""

import logging
from types import SimpleNamespace

import pytest

from lightning_fastft.activations.checkpointing import OffloadCheckpointing
from lightning_fastft.activations.values import SEGMENT_ATTRIBUTE
from lightning_fastft.callbacks.fused_kernels import FusedKernels
from lightning_fastft.core.errors import SwapError
from lightning_fastft.core.patcher import ModelPatcher
from lightning_fastft.graphs.launch_bound import LaunchBoundProbe
from tests.graphs.test_layer_graphs import PACKS, Repeating, assert_same, install, train, twins
from tests.support.layer_pairs import build, fuse, layers_of


class Queue:
    """A device that takes one piece of work after the other; times in ms."""

    def __init__(self):
        self.now = 0.0
        self.free_at = 0.0

    def run(self, *, host, device):
        """The host takes this long to queue work that takes the device that long."""
        self.now += host
        self.free_at = max(self.free_at, self.now) + device

    def mark(self):
        marked = SimpleNamespace(at=None)
        marked.record = lambda: setattr(marked, "at", self.free_at)
        marked.query = lambda: marked.at <= self.now
        return marked


def watch(pace, queue, *, host, device, num_layers=8, num_batches=4):
    """Micro-batches whose backward takes twice as long as their forward on both sides; returns how many were
    watched.
    """
    num_watched = 0
    for _ in range(num_batches):
        is_watched = pace.begin_batch()
        num_watched += is_watched
        for _ in range(num_layers):
            queue.run(host=host, device=device)
            if is_watched:
                pace.layer_queued()
        for _ in range(num_layers):
            queue.run(host=2 * host, device=2 * device)
    return num_watched


@pytest.mark.parametrize(
    ("host", "device", "is_launch_bound"), [(3.0, 1.0, True), (1.2, 1.0, True), (1.0, 1.2, False), (1.0, 20.0, False)]
)
def test_a_host_that_takes_longer_than_the_device_is_late(host, device, is_launch_bound):
    queue = Queue()
    pace = LaunchBoundProbe(queue.mark)
    assert watch(pace, queue, host=host, device=device) == 2
    assert pace.is_launch_bound is is_launch_bound, pace.describe()


def test_a_wait_once_a_step_does_not_make_a_host_late():
    queue = Queue()
    pace = LaunchBoundProbe(queue.mark)
    for _ in range(2):
        assert pace.begin_batch()
        queue.now = max(queue.now, queue.free_at)
        for _ in range(28):
            queue.run(host=1.0, device=3.0)
            pace.layer_queued()
    assert not pace.begin_batch()
    assert not pace.is_launch_bound
    # The first answer of each forward, after which the host is ahead.
    assert pace.describe() == "the device waited for the host at 0 % of layers"


class Answer:
    def __init__(self, *, is_done):
        self.record = lambda: None
        self.query = lambda: is_done


def auto_twins(*, is_launch_bound, recorder=None):
    model, plain, graphs = twins("qwen3", "lora")
    graphs._pace = LaunchBoundProbe(lambda: Answer(is_done=is_launch_bound))
    graphs._recorder = recorder or graphs._recorder
    return model, plain, graphs


def test_layers_are_recorded_where_the_device_waits():
    model, plain, graphs = auto_twins(is_launch_bound=True)
    assert graphs.status().reason == "2 layers, recorded after the first steps if training is launch-bound"
    assert_same(train(model), train(plain))
    # Two micro-batches warm up and two are watched.
    assert graphs.num_replays == 2 * (len(PACKS) - 4), graphs.reasons
    assert graphs.status().state == "active"
    assert graphs.status().reason.endswith("; before, the device waited for the host at 100 % of layers")


def test_layers_run_as_ever_where_the_host_is_ahead():
    model, plain, graphs = auto_twins(is_launch_bound=False)
    assert_same(train(model), train(plain))
    assert graphs.num_replays == 0
    assert graphs._recorder.num_recorded == 0
    status = graphs.status()
    assert (status.state, status.reason) == ("inactive", "the device waited for the host at 0 % of layers")


class Failing(Repeating):
    """Fails once, in the middle, when what autograd needed for a backward is gone; what is being recorded has
    changed no memory.
    """

    def __init__(self, number, message="operation not permitted when stream is capturing"):
        super().__init__()
        self._numbers = [number]
        self._message = message
        self.memory = list

    def record(self, work):
        if self.num_recorded in self._numbers:
            self._numbers.clear()
            before = [(tensor, tensor.clone()) for tensor in self.memory()]
            work()
            for tensor, value in before:
                tensor.data.copy_(value)
            raise RuntimeError(self._message)
        return super().record(work)


@pytest.mark.parametrize(("number", "num_replays"), [(0, 0), (1, 1), (2, 2), (3, 2)])
def test_where_recording_fails_layers_run_as_ever_with_a_warning(caplog, number, num_replays):
    model, plain, graphs = auto_twins(is_launch_bound=True, recorder=Failing(number))
    graphs._recorder.memory = lambda: [*graphs._buffers.values(), *graphs._grads.values()]
    with caplog.at_level(logging.WARNING):
        assert_same(train(model), train(plain))
    assert (
        sum("could not be recorded" in record.message and "eagerly" in record.message for record in caplog.records) == 1
    )
    # The forwards before the recording that failed: the first two are those of both layers.
    assert graphs.num_replays == num_replays
    assert graphs._recorder.num_recorded == number
    # Nor does it hold memory for recordings that will never be.
    assert not any((graphs.pack_buckets, graphs._buffers, graphs._grads))
    assert graphs.status().state == "inactive"
    assert "could not be recorded" in graphs.status().reason


def test_who_asks_for_graphs_is_told_where_recording_fails():
    model = build("qwen3", "lora")
    install(model, recorder=Failing(0))
    with pytest.raises(
        SwapError, match=r"could not be recorded as a CUDA graph\. Use FusedKernels\(cuda_graphs=False\)"
    ):
        train(model)


@pytest.mark.parametrize(
    "message",
    [
        "CUDA error: operation would make the legacy stream depend on a capturing blocking stream",
        "During CUDA graph capture, autograd node 'torch::autograd::AccumulateGrad' has a stale reference to the default "
        "stream (stream 0) from warmup. This will invalidate the capture",
        "During CUDA graph capture, autograd tried to synchronize streams across the capture boundary (leaf stream 0 is "
        "not capturing but the caller's stream is), which would invalidate the capture.",
    ],
    ids=["CUDA", "torch 2.13", "torch 2.15"],
)
def test_who_holds_the_loss_of_an_earlier_step_is_told(message):
    model = build("qwen3", "lora")
    install(model, recorder=Failing(0, message))
    with pytest.raises(SwapError, match=r"keep loss\.detach\(\)"):
        train(model)


def test_the_option_decides_who_is_asked():
    for option, has_pace in ((True, False), ("auto", True)):
        model = build("qwen3", "lora")
        callback, patcher = FusedKernels(cuda_graphs=option), ModelPatcher()
        callback.install(model, patcher)
        (graphs,) = callback._graphs
        assert (graphs._pace is not None) is has_pace
        patcher.undo()


def test_segments_know_what_the_device_may_hold():
    from lightning_fastft.patches.packed import install_packed_training

    model = build("qwen3", "lora")
    fuse(model)
    install_packed_training(model, ModelPatcher(), checkpointing=OffloadCheckpointing("auto", vram_budget=1.5))
    budgets = [vars(layer.self_attn)[SEGMENT_ATTRIBUTE].vram_budget_bytes for layer in layers_of(model)]
    assert budgets == [1.5 * 2**30] * len(layers_of(model))
