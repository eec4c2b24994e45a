"""The slab hands out every byte once and forgets nothing; a staging slot is never written under a tensor that lives."""

import itertools
import mmap
import random

import pytest
import torch

from lightning_fastft.activations.slots import ALIGNMENT_BYTES, PinnedSlab, StagingSlot
from lightning_fastft.activations.streams import CopyStreams
from lightning_fastft.core.errors import HostMemoryError

CPU = torch.device("cpu")


def test_regions_never_overlap_and_all_bytes_come_back():
    slab, rng, held = PinnedSlab(64 * ALIGNMENT_BYTES, device=CPU), random.Random(0), []
    for _ in range(2000):
        if held and rng.random() < 0.5:
            slab.release(held.pop(rng.randrange(len(held))), marks=[])
        else:
            region = slab.reserve(rng.randrange(1, 8 * ALIGNMENT_BYTES))
            if region is not None:
                held.append(region)
        spans = sorted((region.start, region.start + region.num_bytes) for region in held)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
        assert slab.used_bytes == sum(region.num_bytes for region in held)
    for region in held:
        slab.release(region, marks=[])
    # One stretch again, not crumbs.
    assert slab.reserve(64 * ALIGNMENT_BYTES) is not None


def test_the_storage_of_a_region_begins_with_a_page_of_the_slab():
    """torch asks for the start of the storage whether a tensor is pinned, and pages are pinned whole."""
    for num_bytes in (1, 5000):
        storage = PinnedSlab(num_bytes, device=CPU).reserve(num_bytes).tensor.untyped_storage()
        assert storage.data_ptr() % mmap.PAGESIZE == 0


def test_what_does_not_fit_is_none():
    slab = PinnedSlab(ALIGNMENT_BYTES, device=CPU)
    assert slab.reserve(ALIGNMENT_BYTES + 1) is None
    assert slab.reserve(1) is not None
    assert slab.reserve(1) is None
    assert PinnedSlab(0, device=CPU).reserve(1) is None


def test_marks_of_the_last_use_follow_the_bytes():
    slab = PinnedSlab(4 * ALIGNMENT_BYTES, device=CPU)
    first, second = slab.reserve(2 * ALIGNMENT_BYTES), slab.reserve(2 * ALIGNMENT_BYTES)
    slab.release(first, marks=["a"])
    slab.release(second, marks=["b", None])
    # The middle half shares bytes with both.
    quarter = slab.reserve(ALIGNMENT_BYTES)
    assert quarter.marks == ["a"]
    assert sorted(slab.reserve(2 * ALIGNMENT_BYTES).marks) == ["a", "b"]
    assert slab.reserve(ALIGNMENT_BYTES).marks == ["b"]


def test_memory_that_the_host_does_not_have_is_an_error_with_advice():
    with pytest.raises(HostMemoryError, match="lower host_budget"):
        PinnedSlab(2**55, device=CPU)


def test_close_gives_everything_back_twice():
    slab = PinnedSlab(ALIGNMENT_BYTES, device=CPU)
    slab.close()
    slab.close()
    assert slab.num_bytes == slab.used_bytes == 0


def test_a_tensor_that_outlives_its_segment_keeps_its_memory(caplog):
    class Owner:
        pass

    slot, owner = StagingSlot(ALIGNMENT_BYTES, streams=CopyStreams()), Owner()
    slot.take(owner)
    kept = slot.bytes[:4]
    kept.fill_(7)
    slot.leave(None)
    slot.take(owner)
    slot.bytes.fill_(9)
    assert kept.tolist() == [7] * 4
    assert slot.num_replaced == 1
    assert "outlived" in caplog.text
    slot.leave(None)
    slot.take(owner)
    assert slot.num_replaced == 1


def test_a_slot_is_free_when_its_owner_dies():
    class Owner:
        pass

    slot, owner = StagingSlot(ALIGNMENT_BYTES, streams=CopyStreams()), Owner()
    assert slot.is_free
    slot.take(owner)
    assert not slot.is_free
    del owner
    assert slot.is_free
