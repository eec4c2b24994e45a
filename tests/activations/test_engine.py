"""The engine alone: layouts come back as they were, fetches run ahead, and what does not fit is said, not lost."""

import pytest
import torch

from lightning_fastft.activations.engine import OffloadEngine
from lightning_fastft.activations.streams import CopyStreams
from lightning_fastft.core.errors import SwapError
from tests.support.engine_use import describe_use
from tests.support.late_streams import LateStreams


def make_engine(**options):
    return OffloadEngine(LateStreams(), **{"host_bytes": 1 << 20, "slot_bytes": 1 << 16, **options})


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool, torch.complex64]
)
def test_bytes_come_back_whatever_the_dtype(dtype):
    engine = make_engine()
    tensor = torch.randint(0, 2, (3, 5)).to(dtype)
    back = engine.load(engine.store(engine.open_group(), tensor))
    assert back.dtype is dtype
    assert torch.equal(back, tensor)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(6, 4).t(),
        lambda: torch.randn(2, 3, 4).permute(2, 0, 1),
        lambda: torch.randn(10, 8)[3:7],
        lambda: torch.randn(1, 7, 1, 5).transpose(1, 3),
        lambda: torch.tensor(3.0),
    ],
)
def test_strides_and_offsets_of_gapless_tensors_are_kept(make):
    engine, tensor = make_engine(), make()
    back = engine.load(engine.store(engine.open_group(), tensor))
    assert back.stride() == tensor.stride()
    assert torch.equal(back, tensor)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(4, 8)[:, ::2],
        lambda: torch.randn(3, 1).expand(3, 5),
        lambda: torch.empty(0),
        lambda: torch.randn(4, 6)[:, 1:3],
    ],
)
def test_tensors_with_gaps_or_overlaps_stay_where_they_are(make):
    engine = make_engine()
    assert engine.store(engine.open_group(), make()) is None
    assert describe_use(engine)["num_kept"] == 1


def test_a_full_slab_keeps_the_tensor_on_the_device():
    engine = make_engine(host_bytes=1024)
    group = engine.open_group()
    first, second = engine.store(group, torch.ones(200)), engine.store(group, torch.ones(200))
    assert first is not None
    assert second is None


def test_the_one_before_is_fetched_before_it_is_asked_for():
    engine = make_engine()
    groups, allocations = [], []
    for number in range(4):
        groups.append(engine.open_group())
        allocations.append(engine.store(groups[-1], torch.full((8,), float(number))))
    engine.enter_backward(groups[3])
    assert [allocation.staged is not None for allocation in allocations] == [False, False, True, True]
    assert engine.load(allocations[3]).tolist() == [3.0] * 8
    engine.enter_backward(groups[2])
    assert [allocation.staged is not None for allocation in allocations] == [False, True, True, False]


def test_one_buffer_fetches_when_asked():
    engine = make_engine(buffers=1)
    groups = [engine.open_group() for _ in range(2)]
    allocations = [engine.store(group, torch.ones(8)) for group in groups]
    engine.enter_backward(groups[1])
    assert allocations[0].staged is None
    assert engine.load(allocations[0]).tolist() == [1.0] * 8


def test_a_segment_without_host_tensors_starts_the_fetch_of_the_one_before():
    engine = make_engine()
    group, empty = engine.open_group(), None
    allocation = engine.store(group, torch.ones(8))
    empty = engine.open_group()
    engine.enter_backward(empty)
    assert allocation.staged is not None


def test_a_segment_larger_than_a_slot_is_staged_outside_and_counted():
    engine = make_engine(slot_bytes=512)
    allocation = engine.store(engine.open_group(), torch.arange(1000.0))
    assert torch.equal(engine.load(allocation), torch.arange(1000.0))
    assert describe_use(engine)["num_unplanned"] == 1


def test_sources_live_until_compute_has_waited_and_no_longer():
    engine = make_engine(slot_bytes=4096)
    group = engine.open_group()
    allocations = [engine.store(group, torch.ones(512)) for _ in range(5)]
    # Two tensors of 2,048 bytes fill what may be under way.
    assert len(engine._in_flight) == 2
    engine.enter_backward(engine.open_group())
    assert not engine._in_flight
    assert all(allocation is not None for allocation in allocations)


def test_writing_to_a_source_under_way_is_an_error():
    engine = make_engine()
    group, tensor = engine.open_group(), torch.ones(8)
    allocation = engine.store(group, tensor)
    tensor.add_(1)
    with pytest.raises(SwapError, match="written to in place"):
        engine.load(allocation)


def test_memory_of_dead_leases_is_used_again():
    engine = make_engine(host_bytes=2048)
    for number in range(50):
        group = engine.open_group()
        allocations = [engine.store(group, torch.full((250,), float(number + part))) for part in range(2)]
        assert [engine.load(allocation)[0].item() for allocation in allocations] == [number, number + 1]
        del allocations, group
    use = describe_use(engine)
    assert (use["num_kept"], use["pinned_used_bytes"]) == (0, 0)


def test_close_gives_everything_back():
    engine = OffloadEngine(CopyStreams(), host_bytes=4096, slot_bytes=1024)
    engine.store(engine.open_group(), torch.ones(8))
    engine.close()
    engine.close()
    use = describe_use(engine)
    assert (use["pinned_bytes"], use["staging_bytes"]) == (0, 0)
