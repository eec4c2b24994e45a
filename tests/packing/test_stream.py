import functools
import pickle

import numpy as np
import pytest
import torch

from lightning_fastft.packing import stream as stream_module
from lightning_fastft.packing.context import Document
from lightning_fastft.packing.planner import StepPlan, pack_best_fit_decreasing
from lightning_fastft.packing.stream import DocumentSubset, PackedLoader, PlannedStream


class Documents:
    """Documents whose every id is the document's number."""

    fingerprint = "numbers"

    def __init__(self, length_N):
        self.length_N = np.asarray(length_N)
        self.num_labelled_N = self.length_N - 1

    def __getitem__(self, number):
        ids = np.full(self.length_N[number], number)
        return Document(ids, ids)


def numbers_in(batch) -> list[int]:
    context = batch.context
    starts = context.start_host_S1[:-1]
    return batch["input_ids"][0, starts[starts < context.num_real_tokens]].tolist()


def stream_of(length_N, *, max_tokens=40, world_size=1, accumulate=1, index_N=None, seed=0, **options) -> PlannedStream:
    subset = DocumentSubset(Documents(length_N), index_N=index_N)
    plan = StepPlan(
        pack_best_fit_decreasing(subset.length_N, max_tokens=max_tokens),
        length_N=subset.length_N,
        num_labelled_N=subset.num_labelled_N,
        seed=seed,
        world_size=world_size,
        accumulate=accumulate,
    )
    return PlannedStream(subset, plan, rank=options.pop("rank", 0), **options)


class Worker:
    def __init__(self, number, num_workers):
        self.id, self.num_workers = number, num_workers


@pytest.mark.slow
def test_500_random_stops_lose_and_repeat_no_document(monkeypatch):
    generator = np.random.default_rng(0)
    for _ in range(500):
        length_N = generator.integers(1, 30, int(generator.integers(1, 80)))
        options = {
            "max_tokens": int(generator.integers(30, 120)), "world_size": int(generator.integers(1, 5)), "accumulate": int(generator.integers(1, 4)),
            "seed": int(generator.integers(0, 9)),
        }  # fmt: skip
        num_workers = int(generator.integers(1, 4))
        seen = []
        for rank in range(options["world_size"]):
            plan = stream_of(length_N, rank=rank, **options).plan
            start = int(generator.integers(0, plan.num_micro_batches)) + plan.num_micro_batches
            for begin, end in ((plan.num_micro_batches, start), (start, 2 * plan.num_micro_batches)):
                stream = stream_of(length_N, rank=rank, start=begin, **options)
                parts = []
                for number in range(num_workers):
                    monkeypatch.setattr(stream_module, "get_worker_info", functools.partial(Worker, number, num_workers))
                    parts.append(list(stream))
                # The loader takes from the workers in turn.
                ordered = [part[turn] for turn in range(len(parts[0])) for part in parts if turn < len(part)]
                assert [batch.index for batch in ordered] == list(range(begin, begin + len(ordered)))
                assert len(ordered) == len(stream)
                for batch in ordered[: end - begin]:
                    seen += numbers_in(batch)
        assert sorted(seen) == list(range(len(length_N)))


@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_workers_give_the_order_and_content_of_one_process(num_workers):
    length_N = np.random.default_rng(0).integers(2, 30, 50)
    stream = stream_of(length_N, accumulate=2, start=3)
    alone = list(PackedLoader(lambda: stream, num_batches=20))
    shared = list(PackedLoader(lambda: stream, num_batches=20, num_workers=num_workers))
    assert [batch.index for batch in shared] == [batch.index for batch in alone]
    for batch, other in zip(shared, alone):
        assert torch.equal(batch["input_ids"], other["input_ids"])
        assert torch.equal(batch["labels"], other["labels"])
        assert batch["num_items_in_batch"] == other["num_items_in_batch"]
        # The loss head knows a batch's own labels by their memory.
        assert batch["labels"].data_ptr() == batch.context.label_T.data_ptr()


def test_loader_starts_when_the_first_batch_is_wanted():
    opened = []
    stream = stream_of([5, 5, 5])
    loader = PackedLoader(lambda: opened.append(1) or stream, num_batches=1)
    iterator = iter(loader)
    assert not opened
    next(iterator)
    assert opened == [1]


def test_loader_leaves_the_global_generator_alone():
    loader = PackedLoader(lambda: stream_of([5, 5, 5]), num_batches=1)
    state = torch.get_rng_state()
    list(loader)
    assert torch.equal(torch.get_rng_state(), state)


def test_subset_numbers_its_documents_from_0():
    subset = DocumentSubset(Documents([3, 4, 5, 6]), index_N=np.array([1, 3]))
    assert len(subset) == 2
    assert subset.length_N.tolist() == [4, 6]
    assert subset[1].input_ids.tolist() == [3] * 6
    assert pickle.loads(pickle.dumps(subset))[0].input_ids.tolist() == [1] * 4


def test_pad_to_max_gives_static_shapes():
    shapes = {batch["input_ids"].shape for batch in stream_of([5, 6, 7, 30], max_tokens=32, world_size=3, pad_to=32, pad_token_id=9)}
    assert shapes == {(1, 32)}


def test_empty_pack_is_padding_with_a_loss_of_zero():
    batches = [next(iter(stream_of([5], world_size=2, rank=rank))) for rank in (0, 1)]
    empty = min(batches, key=lambda batch: batch.context.num_labelled)
    assert numbers_in(empty) == []
    assert empty.context.num_labelled == 0
    assert empty["num_items_in_batch"] == max(batches, key=lambda batch: batch.context.num_labelled)["num_items_in_batch"] == 2.0


def test_repeat_first_epoch_gives_the_same_order_under_new_indices():
    length_N = np.random.default_rng(0).integers(2, 30, 50)
    first = list(stream_of(length_N, repeat_first_epoch=True))
    second = list(stream_of(length_N, repeat_first_epoch=True, start=len(first)))
    assert [numbers_in(batch) for batch in first] == [numbers_in(batch) for batch in second]
    assert second[0].index == len(first)
    assert [numbers_in(batch) for batch in stream_of(length_N, start=len(first))] != [numbers_in(batch) for batch in first]


@pytest.mark.gpu
def test_loader_pins_what_it_hands_out():
    loader = PackedLoader(lambda: stream_of([5, 5, 5]), num_batches=1, num_workers=1, pin_memory=True)
    batch = next(iter(loader))
    assert batch["input_ids"].is_pinned()
    assert batch.context.position_T.is_pinned()
    assert batch["labels"].data_ptr() == batch.context.label_T.data_ptr()
