"""WeightStreamer: whatever the order of use and however late copies and compute run, compute reads the right
layer; detach gives every byte back.
"""

import random

import pytest
import torch

from lightning_fastft.activations.streams import CopyStreams
from lightning_fastft.activations.weights import WeightStreamer
from lightning_fastft.core.errors import HostMemoryError, OptionError, SwapError
from tests.support.late_streams import LateStreams
from tests.support.truth import Watch

CPU = torch.device("cpu")


def make_layers(num_layers, *, seed=0):
    """Layers of different sizes, dtypes and layouts, and what they hold."""
    generator = torch.Generator().manual_seed(seed)
    layers = []
    for index in range(num_layers):
        matrix = torch.randn(5 + 3 * (index % 2), 7, generator=generator)
        layers.append(
            [
                matrix,
                matrix.bfloat16().T,
                torch.randint(0, 256, (600 + index, 1), generator=generator, dtype=torch.uint8),
                torch.empty(0),
            ]
        )
    return layers, [[tensor.clone() for tensor in tensors] for tensors in layers]


def poison(streamer):
    for target in streamer._targets:
        target.fill_(0xFF)


def attached(layers, streams, **options):
    streamer = WeightStreamer(layers, streams=streams, **options)
    streamer.attach()
    poison(streamer)
    return streamer


def assert_equal(tensors, expected):
    for tensor, truth in zip(tensors, expected):
        assert tensor.shape == truth.shape
        assert tensor.dtype is truth.dtype
        assert torch.equal(tensor, truth)


class Operation:
    """One entry of a queue: runs when it is the first and everything it waits for has run."""

    def __init__(self, waits, run=lambda: None):
        self.waits, self.run, self.is_done = list(waits), run, False


class QueuedLanes:
    """Copy streams and a compute stream that all run later than the host, in any order that the marks allow.

    ``is_faulty_copy`` forgets what a copy must wait for, ``is_faulty_compute`` what compute must wait for.
    """

    def __init__(self, *, is_faulty_copy=False, is_faulty_compute=False):
        self.device = CPU
        self.is_faulty_copy, self.is_faulty_compute = is_faulty_copy, is_faulty_compute
        self.num_copies = 0
        self._compute, self._copies = [], []

    def compute(self, run):
        self._compute.append(Operation([], run))

    def mark_compute(self):
        self._compute.append(Operation([]))
        return self._compute[-1]

    def wait_compute(self, mark):
        self._compute.append(Operation([] if self.is_faulty_compute else [mark]))

    def copy_in(self, device, host, *, after):
        self.num_copies += 1
        self._copies.append(Operation([] if self.is_faulty_copy else after, lambda: device.copy_(host)))
        return self._copies[-1]

    def copy_out(self, host, device, *, after):
        raise AssertionError("weights never leave the device")

    def synchronize(self):
        self.run(random.Random(0))

    def run(self, rng):
        """Run everything; how eager each queue is changes from stretch to stretch."""
        queues = [self._compute, self._copies]
        while any(queues):
            ready = [queue for queue in queues if queue and all(mark.is_done for mark in queue[0].waits)]
            assert ready, "nothing can run: a circle of waits"
            queue = rng.choice(ready)
            for _ in range(rng.choice((1, 1, 5, 50))):
                if not queue or not all(mark.is_done for mark in queue[0].waits):
                    break
                operation = queue.pop(0)
                operation.run()
                operation.is_done = True


def random_order(rng, num_layers):
    """Uses as they come: forwards, backwards with recompute, broken-off passes."""
    order = []
    for _ in range(rng.randint(2, 5)):
        kind = rng.choice(("forward", "backward", "broken forward", "broken backward", "jumps"))
        uses = [(index, 1) for index in range(num_layers)]
        if "backward" in kind:
            uses = [use for index in reversed(range(num_layers)) for use in ((index, -1), (index, 1))]
        if kind == "jumps":
            uses = [(rng.randrange(num_layers), rng.choice((1, -1))) for _ in range(6)]
        order += uses[: rng.randint(1, len(uses))] if "broken" in kind else uses
    return order


def run_queued(streams, *, seed):
    rng = random.Random(seed)
    num_layers = rng.randint(1, 7)
    layers, truth = make_layers(num_layers, seed=seed)
    streamer = attached(layers, streams, num_slots=rng.randint(2, 4))
    reads = []
    for index, direction in random_order(rng, num_layers):
        streamer.use(index, direction=direction)
        streams.compute(lambda index=index: reads.append((index, [tensor.clone() for tensor in layers[index]])))
        if rng.random() < 0.1:
            streams.run(rng)
    streams.run(rng)
    assert reads
    for index, tensors in reads:
        assert_equal(tensors, truth[index])


def run_many_orders(**fault):
    for seed in range(300):
        run_queued(QueuedLanes(**fault), seed=seed)


def test_compute_reads_the_right_layer_in_any_order_that_the_marks_allow():
    run_many_orders()


@pytest.mark.parametrize("fault", ["is_faulty_copy", "is_faulty_compute"])
def test_a_forgotten_wait_is_seen(fault):
    """The teeth of the test above: a slot overwritten too early, a layer read too early."""
    with pytest.raises(AssertionError):
        run_many_orders(**{fault: True})


@pytest.mark.parametrize("num_layers", range(1, 8))
@pytest.mark.parametrize("seed", [None, 1, 2])
def test_late_copies(num_layers, seed):
    layers, truth = make_layers(num_layers)
    streamer = attached(layers, LateStreams(seed=seed))
    for index, direction in random_order(random.Random(num_layers), num_layers):
        streamer.use(index, direction=direction)
        assert_equal(layers[index], truth[index])


def test_views_taken_in_the_forward_are_right_in_the_backward():
    layers, truth = make_layers(6)
    streamer = attached(layers, LateStreams())
    views = []
    for index in range(6):
        streamer.use(index, direction=1)
        views.append(layers[index][0].t())
    for index in reversed(range(6)):
        streamer.use(index, direction=-1)
        assert torch.equal(views[index], truth[index][0].t())


@pytest.mark.parametrize("num_slots", [2, 3, 4])
@pytest.mark.parametrize("num_layers", range(1, 8))
def test_a_step_copies_each_layer_at_most_twice_and_nothing_that_is_still_there(num_layers, num_slots):
    layers, _ = make_layers(num_layers)
    streams = LateStreams()
    streamer = attached(layers, streams, num_slots=num_slots)
    counts = []
    for _ in range(3):
        before = streams.num_copies
        for index in range(num_layers):
            streamer.use(index, direction=1)
        for index in reversed(range(num_layers)):
            streamer.use(index, direction=-1)
            streamer.use(index, direction=1)  # what a recompute does
        counts.append(streams.num_copies - before)
    num_left = max(0, num_layers - num_slots)
    assert counts[0] == num_layers + num_left
    # The first layers are there from the backward before.
    assert counts[1:] == [2 * num_left] * 2


def test_the_next_layer_is_on_its_way_before_compute_asks_for_it():
    layers, _ = make_layers(7)
    streamer = attached(layers, LateStreams())
    for index in range(6):
        streamer.use(index, direction=1)
        assert index + 1 in streamer._content
    for index in reversed(range(1, 7)):
        streamer.use(index, direction=-1)
        streamer.use(index, direction=1)
        assert index - 1 in streamer._content


def test_sizes_and_what_the_device_holds():
    layers, _ = make_layers(5)
    streamer = WeightStreamer(layers, streams=CopyStreams(), num_slots=2)
    sizes = [sum(-(-tensor.numel() * tensor.element_size() // 512) * 512 for tensor in tensors) for tensors in layers]
    assert streamer.num_host_bytes == sum(sizes)
    assert streamer.num_slot_bytes == max(sizes[0::2]) + max(sizes[1::2])
    asked = []
    streamer._allocate_host = lambda num_bytes: (
        asked.append(num_bytes) or torch.empty(num_bytes + 512, dtype=torch.uint8)[512:]
    )
    streamer.attach()
    assert asked == sizes
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensors in layers
        for tensor in tensors
    }
    assert sum(storages.values()) == streamer.num_slot_bytes
    assert all(tensor.data_ptr() % 64 == 0 for tensors in layers for tensor in tensors)


def test_no_use_waits_or_allocates():
    layers, _ = make_layers(5)
    streamer = attached(layers, CopyStreams())
    with Watch() as watch:
        for index in (0, 1, 2, 3, 4, 4, 3, 2, 1, 0, 0, 1):
            streamer.use(index, direction=1)
    assert watch.waits == []
    assert all(len(shape) == 1 for shape in watch.shapes)


@pytest.mark.parametrize("num_uses", [0, 1, 4])
def test_detach_gives_every_byte_back_and_can_be_repeated(num_uses):
    layers, truth = make_layers(5)
    kept = [tensors[0] for tensors in layers]
    streams = LateStreams()
    streamer = attached(layers, streams)
    for _ in range(2):
        streamer.attach()
        for index in range(num_uses):
            streamer.use(index, direction=1)
        streamer.detach()
        streamer.detach()
        # No copy is left that would write into memory that was given back.
        assert not streams._in
        assert all(tensors[0] is tensor for tensors, tensor in zip(layers, kept))
        for tensors, expected in zip(layers, truth):
            assert_equal(tensors, expected)
        assert len({tensor.untyped_storage().data_ptr() for tensors in layers for tensor in tensors[:3]}) == 15
        assert streamer._host == streamer._targets == []
        streamer.attach()
        poison(streamer)
    streamer.use(3, direction=1)
    assert_equal(layers[3], truth[3])


def test_a_copy_that_fails_leaves_nothing_half_done():
    class Failing(CopyStreams):
        fails = False

        def copy_in(self, device, host, *, after):
            if self.fails:
                raise RuntimeError("planted")
            super().copy_in(device, host, after=after)

    layers, truth = make_layers(6)
    streams = Failing()
    streamer = attached(layers, streams)
    streamer.use(0, direction=1)
    streams.fails = True
    with pytest.raises(RuntimeError, match="planted"):
        streamer.use(4, direction=1)
    with pytest.raises(RuntimeError, match="planted"):
        streamer.use(4, direction=1)
    streams.fails = False
    for index in (4, 5, 0, 1, 2):
        streamer.use(index, direction=1)
        assert_equal(layers[index], truth[index])
    streamer.detach()
    for tensors, expected in zip(layers, truth):
        assert_equal(tensors, expected)


def test_a_device_without_room_gets_host_tensors_and_a_warning(monkeypatch):
    layers, truth = make_layers(3)
    streamer = attached(layers, CopyStreams())
    restore, calls = streamer._restore, []

    def fail_first(device):
        calls.append(device)
        restore(device)
        if len(calls) == 1:
            raise torch.OutOfMemoryError("planted")

    monkeypatch.setattr(streamer, "_restore", fail_first)
    with pytest.warns(UserWarning, match="cannot hold"):
        streamer.detach()
    assert calls == [None, CPU]
    for tensors, expected in zip(layers, truth):
        assert_equal(tensors, expected)


def test_works_for_training_when_attached_in_inference_mode():
    layers, truth = make_layers(4)
    with torch.inference_mode():
        streamer = attached(layers, LateStreams())
        streamer.use(0, direction=1)
    x = torch.randn(2, 5, requires_grad=True)
    streamer.use(2, direction=1)
    (x @ layers[2][0]).sum().backward()
    assert torch.equal(x.grad, torch.ones(2, 7) @ truth[2][0].T)
    streamer.detach()
    assert not layers[0][0].is_inference()


def test_host_views_are_the_weights():
    layers, truth = make_layers(4)
    streamer = attached(layers, LateStreams())
    for index in range(4):
        assert_equal(streamer.host_views(index), truth[index])
    streamer.detach()
    with pytest.raises(SwapError, match="not streamed"):
        streamer.host_views(0)


def test_a_tensor_that_was_moved_is_refused():
    layers, _ = make_layers(4)
    streamer = attached(layers, CopyStreams())
    layers[2][1].data = layers[2][1].clone()
    streamer.use(1, direction=1)
    with pytest.raises(SwapError, match="tensor 1 of layer 2"):
        streamer.use(2, direction=1)


def test_use_after_detach_is_refused():
    layers, _ = make_layers(2)
    streamer = attached(layers, CopyStreams())
    streamer.detach()
    with pytest.raises(SwapError, match="before teardown"):
        streamer.use(0, direction=-1)


def test_tensors_that_cannot_be_streamed_are_refused():
    shared = torch.zeros(4, 4)
    result = torch.zeros(2, requires_grad=True) * 2
    for layers, message in (
        ([], "no layer"),
        ([[torch.zeros(2, requires_grad=True)]], "trained"),
        ([[result]], "trained"),
        ([[shared], [shared]], "tied weights"),
        ([[shared, shared[2:]]], "shares memory"),
        ([[torch.zeros(2, device="meta")]], "meta"),
        ([[torch.zeros(2, 2).to_sparse()]], "layout"),
    ):
        with pytest.raises(OptionError, match=message):
            WeightStreamer(layers, streams=CopyStreams())
    with pytest.raises(OptionError, match="num_slots"):
        WeightStreamer([[shared]], streams=CopyStreams(), num_slots=1)
    # Parts of one block that do not meet are no shared memory.
    WeightStreamer([[shared[:2]], [shared[2:]]], streams=CopyStreams())


def test_each_layer_leaves_its_memory_before_the_next_one_is_copied():
    """Otherwise the host would hold weights that were loaded there twice."""
    layers, truth = make_layers(5)
    own = [tensors[0].data_ptr() for tensors in layers]
    moved = []

    def allocate(num_bytes):
        moved.append([tensors[0].data_ptr() != address for tensors, address in zip(layers, own)])
        if len(moved) == 5 and streamer.fails:
            raise HostMemoryError("planted")
        return torch.empty(num_bytes, dtype=torch.uint8)

    streamer = WeightStreamer(layers, streams=CopyStreams(), allocate_host=allocate)
    streamer.fails = True
    with pytest.raises(HostMemoryError, match="planted"):
        streamer.attach()
    assert [sum(row) for row in moved] == [0, 1, 2, 3, 4]
    for tensors, expected in zip(layers, truth):
        assert_equal(tensors, expected)
    streamer.fails = False
    streamer.attach()
    streamer.use(4, direction=1)
    assert_equal(layers[4], truth[4])
    # Likewise on the way back.
    freed = []
    streamer._free_host = lambda memory: freed.append([len(host) > 0 for host in streamer._host])
    streamer.detach()
    assert [sum(row) for row in freed] == [5, 4, 3, 2, 1]
    for tensors, expected in zip(layers, truth):
        assert_equal(tensors, expected)


def test_host_memory_that_does_not_do_is_refused_and_nothing_is_changed():
    layers, truth = make_layers(3)
    for allocate in (
        lambda n: torch.empty(n - 1, dtype=torch.uint8),
        lambda n: torch.empty(n),
        lambda n: torch.empty(n, 1, dtype=torch.uint8),
    ):
        streamer = WeightStreamer(layers, streams=CopyStreams(), allocate_host=allocate)
        with pytest.raises(HostMemoryError, match="allocate_host"):
            streamer.attach()
        streamer.detach()
        for tensors, expected in zip(layers, truth):
            assert_equal(tensors, expected)
    streams = CopyStreams(torch.device("cuda"))
    with pytest.raises(HostMemoryError, match="pinned"):
        WeightStreamer(layers, streams=streams).attach()
