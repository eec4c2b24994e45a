"""Buckets of recordings: few of them hold packs of any length, and the first one has the memory of all."""

import numpy as np
import pytest
import torch

from lightning_fastft.graphs.buckets import PackBuckets, StaticInput
from lightning_fastft.packing.context import BatchContext


def make_context(lengths):
    return BatchContext(lengths=lengths, label_T=torch.full((sum(lengths),), -100), num_items=1)


def draw_packs(num_packs, *, shortest, longest, mean, seed=0):
    """Packs of lengths and documents that hardly ever come again."""
    generator = np.random.default_rng(seed)
    for num_tokens in generator.integers(shortest, longest + 1, num_packs):
        lengths = []
        while sum(lengths) < num_tokens:
            length = int(np.clip(generator.lognormal(np.log(mean) - 0.32, 0.8), 16, longest))
            lengths.append(min(length, int(num_tokens) - sum(lengths)))
        yield make_context(lengths)


def run(buckets, packs):
    """Return the sizes of the buckets that were added, and the size from which each pack ran."""
    added, used = [], []
    for context in packs:
        buckets.note(context)
        bucket = buckets.find(context)
        if bucket is None:
            bucket = buckets.add(context, chunk_size=None)
            added.append(bucket.size)
        else:
            bucket.context.load(context)
        assert bucket.size.holds(context)
        used.append(bucket.size)
    return added, used


@pytest.mark.parametrize("mean", [120, 512, 2048])
@pytest.mark.parametrize("shortest", [6000, 500])
def test_few_buckets_hold_packs_of_any_length(mean, shortest):
    buckets = PackBuckets()
    packs = [*draw_packs(300, shortest=shortest, longest=8192, mean=mean)]
    for context in packs[:2]:
        buckets.note(context)
    added, used = run(buckets, packs[2:])
    assert len(buckets.buckets) <= 5
    assert len(added) <= 9
    assert max(size.num_tokens for size in used) == 8192
    # By then, packs that are frequent have recordings of their own.
    num_rows = sum(size.num_tokens for size in used[150:])
    num_tokens = sum(context.num_tokens for context in packs[152:])
    assert num_rows <= (1.1 if shortest == 6000 else 1.5) * num_tokens


def test_packs_of_one_length_have_no_further_rows():
    buckets = PackBuckets()
    _, used = run(buckets, [make_context(lengths) for lengths in ([7, 3], [10], [4, 4, 2])])
    assert {size.num_tokens for size in used} == {10}


def test_a_shorter_pack_runs_from_the_recording_of_packs_of_one_length():
    buckets = PackBuckets()
    _, used = run(buckets, [make_context(lengths) for lengths in ([1000], [1000], [300, 20], [999], [1000])])
    assert {size.num_tokens for size in used} == {1000}
    assert len(buckets.buckets) == 1


def test_the_next_bucket_holds_every_pack_so_far():
    buckets = PackBuckets()
    added, _ = run(buckets, [make_context(lengths) for lengths in ([60, 4], [32] + [2] * 16, [1] * 64)])
    assert added == [(64, 16, 64), (64, 32, 64), (64, 64, 64)]


def test_more_documents_replace_the_bucket_of_as_many_tokens():
    buckets = PackBuckets()
    run(buckets, [make_context([128 - number] + [1] * number) for number in (0, 16, 32, 48, 64)])
    assert [bucket.size for bucket in buckets.buckets] == [(128, 80, 128)]
    # There is room for one of shorter packs that are frequent.
    run(buckets, [make_context([3] * 13)] * 16)
    run(buckets, [make_context([1] * 128)])
    assert [bucket.size for bucket in buckets.buckets] == [(40, 16, 4), (128, 128, 128)]


def test_a_static_input_takes_tensors_of_fewer_tokens_only():
    held = StaticInput(torch.ones(1, 5, 8), num_tokens=5, room=6)
    assert held.memory.shape == (1, 6, 8)
    assert held.memory.sum() == 5 * 8
    held.load(torch.ones(1, 3, 8))
    assert held.memory.sum() == 3 * 8
    assert held.fits(torch.ones(1, 6, 8))
    assert not any(held.fits(torch.ones(shape)) for shape in ((1, 7, 8), (1, 5, 7), (5, 8)))
