"""The probes read what ran: times by a clock that only work moves, bytes by an allocator that only work fills."""

import gc
import weakref
from unittest import mock

import pytest
import torch
from torch import nn

from lightning_fastft.activations.checkpointing import OffloadCheckpointing
from lightning_fastft.activations.probe import (
    Meter,
    SavedBytesProbe,
    StepProbe,
    measure_machine,
)
from lightning_fastft.activations.segments import KEEP, Segment
from lightning_fastft.activations.slots import align
from lightning_fastft.core.patcher import ModelPatcher
from lightning_fastft.patches.packed import install_packed_training
from lightning_fastft.patches.value_points import install_value_points
from tests.support.packs import make_batch
from tests.support.tiny_models import build_tiny

NUM_LAYERS, WIDTH, TOKENS = 3, 16, 40
INPUT_BYTES = TOKENS * WIDTH * 4
FORWARD_MS, BACKWARD_MS, HEAD_MS, OTHER_MS = 3.0, 7.0, 11.0, 5.0
MIB = 2**20
# Reserved memory of the fake allocator beyond the peak of allocated memory.
UNUSED_BYTES = 3 * MIB


class Device:
    """A clock and an allocator in one: nothing moves them but work that says so."""

    is_counted = True

    def __init__(self):
        self.ms = 0.0
        self.num_bytes = self.most = self.num_reserved = 0

    def work(self, *, ms=0.0, transient=0, held=0):
        self.ms += ms
        self.most = max(self.most, self.num_bytes + transient)
        self.num_bytes += held
        self.most = max(self.most, self.num_bytes)
        self.num_reserved = max(self.num_reserved, self.most + UNUSED_BYTES)

    def now(self):
        return self.ms

    def ms_between(self, begin, end):
        return end - begin

    def allocated(self):
        return self.num_bytes

    def start_peak(self):
        self.most = self.num_bytes
        return self.num_bytes

    def reserved(self):
        return self.num_reserved

    def peak(self):
        return self.most


class _Work(torch.autograd.Function):
    """Work of a stated cost in the forward and in the backward."""

    @staticmethod
    def forward(ctx, x, device, forward, backward):
        ctx.device, ctx.backward_work = device, backward
        device.work(**forward)
        return x.clone()

    @staticmethod
    def backward(ctx, d_x):
        ctx.device.work(**ctx.backward_work)
        return d_x.clone(), None, None, None


class Layer(nn.Module):
    """Work, a linear layer, an activation: something to save and a value to hold."""

    def __init__(self, device, *, forward=None, backward=None):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self._device, self._forward, self._backward = (
            device,
            forward or {"ms": FORWARD_MS},
            backward or {"ms": BACKWARD_MS},
        )

    def forward(self, x):
        # The work saves nothing: the replay runs it again because what follows it saves.
        return torch.sigmoid(self.linear(_Work.apply(x, self._device, self._forward, self._backward)))


class Rig:
    """Layers in their segments, a head and an optimizer, around a fake device."""

    def __init__(self, **work):
        self.device = Device()
        self.layers = nn.ModuleList(Layer(self.device, **work) for _ in range(NUM_LAYERS))
        self.segments = [Segment(index) for index in range(NUM_LAYERS)]
        install_value_points(self.layers, list(self.layers), self.segments, ModelPatcher())
        # A first step learns the last point of each layer, as the stack's warm-up does.
        self.forward().backward()

    def forward(self):
        hidden = torch.randn(TOKENS, WIDTH, requires_grad=True)
        for segment, layer in zip(self.segments, self.layers):
            hidden = segment.run(layer, hidden)
        return _Work.apply(hidden, self.device, {"ms": HEAD_MS, "transient": 4 * MIB}, {}).sum()

    def observe(self, observer):
        for segment in self.segments:
            segment.observer = observer

    def timed_step(self, **options):
        probe = StepProbe(self.device, **options)
        self.observe(probe)
        self.forward().backward()
        self.device.work(ms=OTHER_MS)
        self.observe(None)
        probe.step_ends()
        return probe

    def read(self, probe, *, saved=(3 * INPUT_BYTES,) * NUM_LAYERS, extra=0):
        return probe.read(
            self.segments,
            input_bytes=INPUT_BYTES,
            saved_bytes=saved,
            extra_bytes=extra,
            weight_bytes=list(range(100, 100 + NUM_LAYERS)),
        )


def test_times_are_those_of_the_work():
    rig = Rig()
    cost = rig.read(rig.timed_step())
    for segment in cost.segments:
        assert segment.forward_ms == FORWARD_MS
        assert segment.recompute_ms == FORWARD_MS
        assert segment.backward_ms == BACKWARD_MS
    assert cost.head_ms == HEAD_MS
    assert cost.other_ms == OTHER_MS


def test_bytes_are_those_of_the_segments():
    cost = (rig := Rig()).read(
        rig.timed_step(), saved=[(3 + index) * INPUT_BYTES for index in range(NUM_LAYERS)], extra=1000
    )
    # What autograd holds counts the output, which is the next segment's input.
    assert [segment.saved_bytes for segment in cost.segments] == [
        (2 + index) * INPUT_BYTES for index in range(NUM_LAYERS)
    ]
    assert [segment.weight_bytes for segment in cost.segments] == [100, 101, 102]
    assert {segment.input_bytes for segment in cost.segments} == {INPUT_BYTES}
    assert cost.base_bytes == 1000


def test_a_value_is_timed_and_the_last_one_is_not_offered(monkeypatch):
    """The last product is never rebuilt, so nothing is gained by holding it."""
    rig = Rig()
    linear = nn.functional.linear

    def slow(*args):
        rig.device.work(ms=2.0)
        return linear(*args)

    monkeypatch.setattr(nn.functional, "linear", slow)
    for segment in rig.segments:
        segment.last_point = None
    probe = rig.timed_step()
    names = [
        [(value.name, value.num_bytes, value.rebuild_ms) for value in segment.values]
        for segment in rig.read(probe).segments
    ]
    assert names == [[("linear", align(INPUT_BYTES), 2.0)]] * NUM_LAYERS
    for segment in rig.segments:
        segment.last_point = "linear"
    assert all(not segment.values for segment in rig.read(probe).segments)


def test_peaks_are_transients_above_what_is_resident():
    rig = Rig(forward={"ms": 1.0, "transient": 2 * MIB}, backward={"ms": 1.0, "transient": 8 * MIB})
    rig.device.work(held=100 * MIB)
    probe = rig.timed_step()
    # A segment that nobody counted may save all that its backward uses.
    (unknown,) = {
        (segment.saved_bytes, segment.backward_peak_bytes)
        for segment in rig.read(probe, saved=[None] * NUM_LAYERS).segments
    }
    # Each backward begins with the gradient of the output.
    assert unknown == (8 * MIB, INPUT_BYTES)
    cost = rig.read(probe, saved=(MIB + INPUT_BYTES,) * NUM_LAYERS)
    assert {segment.forward_peak_bytes for segment in cost.segments} == {2 * MIB}
    # The replay held what the segment saves when the peak came.
    assert {segment.backward_peak_bytes for segment in cost.segments} == {7 * MIB + INPUT_BYTES}
    # The head reads the last output.
    assert cost.head_peak_bytes == 4 * MIB + INPUT_BYTES
    assert cost.base_bytes == 100 * MIB - INPUT_BYTES


def test_what_happens_between_two_steps_is_no_part_of_a_step():
    rig = Rig()
    probe = StepProbe(rig.device, previous=rig.timed_step())
    rig.observe(probe)
    rig.forward().backward()
    rig.device.work(ms=OTHER_MS)
    # A validation comes before the next forward.
    rig.device.work(ms=10_000.0)
    probe.step_ends()
    assert rig.read(probe).other_ms == OTHER_MS


def test_a_disturbed_layer_takes_its_time_of_the_step_before():
    """Stalls in a forward and a recompute of the first step, in another forward and the head of the second."""
    rig = Rig()
    work = rig.device.work
    stalls = iter(500.0 if number in (1, 7, 14, 15) else 0.0 for number in range(100))
    with mock.patch.object(rig.device, "work", lambda *, ms=0.0, **kwargs: work(ms=ms + next(stalls), **kwargs)):
        cost = rig.read(rig.timed_step(previous=rig.timed_step()))
    assert rig.device.ms > 4 * 500
    assert {segment.forward_ms for segment in cost.segments} == {FORWARD_MS}
    assert {segment.backward_ms for segment in cost.segments} == {BACKWARD_MS}
    assert (cost.head_ms, cost.other_ms) == (HEAD_MS, OTHER_MS)


def test_a_step_before_that_ended_in_an_exception_does_not_count():
    rig = Rig()
    broken = StepProbe(rig.device)
    rig.observe(broken)
    rig.forward()
    cost = rig.read(rig.timed_step(previous=broken))
    assert cost.head_ms == HEAD_MS
    assert {segment.backward_ms for segment in cost.segments} == {BACKWARD_MS}


def test_waits_for_copies_count_for_no_part_of_the_step():
    rig = Rig()
    probe = StepProbe(rig.device)
    work = rig.device.work

    def wait_and_work(**kwargs):
        before = rig.device.now()
        work(ms=30.0)
        probe.waits.append((before, rig.device.now()))
        work(**kwargs)

    rig.observe(probe)
    with mock.patch.object(rig.device, "work", wait_and_work):
        rig.forward().backward()
        rig.device.work(ms=OTHER_MS)
    probe.step_ends()
    cost = rig.read(probe)
    for segment in cost.segments:
        assert (segment.forward_ms, segment.recompute_ms, segment.backward_ms) == (
            FORWARD_MS, FORWARD_MS, BACKWARD_MS
        )  # fmt: skip
    assert (cost.head_ms, cost.other_ms) == (HEAD_MS, OTHER_MS)


def test_a_step_that_was_not_finished_says_so():
    rig = Rig()
    probe = StepProbe(rig.device)
    rig.observe(probe)
    loss = rig.forward()
    assert not probe.has_backward

    def fail(*_):
        raise RuntimeError("planted")

    handle = rig.layers[1].linear.register_full_backward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="planted"):
        rig.forward().backward()
    assert not probe.has_backward, "the backward ended before the first segment"
    handle.remove()
    loss.backward()
    assert probe.has_backward


def test_a_backward_that_ends_above_frozen_layers_is_a_whole_one():
    rig = Rig()
    rig.layers[0].requires_grad_(False)
    probe = StepProbe(rig.device)
    rig.observe(probe)
    hidden = torch.randn(TOKENS, WIDTH)
    for segment, layer in zip(rig.segments, rig.layers):
        hidden = segment.run(layer, hidden)
    hidden.sum().backward()
    assert probe.has_backward


@pytest.mark.parametrize("is_counted", [True, False])
def test_saved_bytes_are_what_autograd_holds(is_counted):
    """The linear layer saves its input, the sigmoid its output; weights are no activations."""
    rig = Rig(forward={"held": 12_345})
    rig.device.is_counted = is_counted
    probe = SavedBytesProbe(rig.device)
    for segment in rig.segments:
        segment.plan = KEEP
        segment.observer = probe
    rig.forward()
    assert probe.saved_bytes == dict.fromkeys(range(NUM_LAYERS), 12_345 if is_counted else 2 * INPUT_BYTES)


def test_a_counted_forward_without_a_backward_leaves_nothing_behind():
    """A hook that returns what an operator gave out would tie the graph to itself."""
    rig = Rig()
    probe = SavedBytesProbe(rig.device)
    outputs = []
    for segment, layer in zip(rig.segments, rig.layers):
        segment.plan, segment.observer = KEEP, probe
        layer.register_forward_hook(lambda module, args, output: outputs.append(weakref.ref(output)))
    gc.disable()
    try:
        rig.forward()
        assert [output() for output in outputs] == [None] * NUM_LAYERS
    finally:
        gc.enable()


def test_gradients_while_probing_are_those_without():
    model, batch = build_tiny("llama").train(), make_batch()
    checkpointing = OffloadCheckpointing("auto", vram_budget=100)
    install_packed_training(model, ModelPatcher(), checkpointing=checkpointing)
    found = []
    for _ in range(4):
        model.zero_grad(set_to_none=True)
        model(**batch).loss.backward()
        found.append([parameter.grad for parameter in model.parameters()])
    assert checkpointing.stacks[0].plan is not None
    for gradients in found[1:]:
        assert all(torch.equal(one, other) for one, other in zip(gradients, found[0]))


def test_a_cpu_counts_time_but_no_memory():
    device = torch.device("cpu")
    meter = Meter(device)
    assert (meter.start_peak(), meter.allocated(), meter.peak(), meter.is_counted) == (0, 0, 0, False)
    assert measure_machine(device).d2h_bytes_per_s > 0
    begin = meter.now()
    assert meter.ms_between(begin, meter.now()) >= 0
