import gc
import multiprocessing
import pickle
import subprocess
import sys
import threading
import traceback

import numpy as np
import pytest
import torch

from lightning_fastft.packing.document import Document
from lightning_fastft.packing.loader import (
    NUM_AHEAD,
    THREAD_NAME,
    DocumentSubset,
    PackedLoader,
    PlannedStream,
    prefetch,
)
from lightning_fastft.packing.packs import pack_best_fit_decreasing
from lightning_fastft.packing.step_plan import StepPlan


class Documents:
    """Documents whose every id is the document's number."""

    fingerprint = "numbers"
    completions = None

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


def loader_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith(THREAD_NAME)]


def have_ended(threads):
    """Whether the threads end by themselves; one that does not would wait for ever."""
    for thread in threads:
        thread.join(timeout=60)
    return not any(thread.is_alive() for thread in threads)


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    gc.collect()
    assert have_ended(loader_threads())


@pytest.mark.slow
@pytest.mark.parametrize("num_stops", [100, pytest.param(500, marks=pytest.mark.fault)])
def test_random_stops_lose_and_repeat_no_document(num_stops):
    generator = np.random.default_rng(0)
    for _ in range(num_stops):
        length_N = generator.integers(1, 30, int(generator.integers(1, 80)))
        options = {
            "max_tokens": int(generator.integers(30, 120)),
            "world_size": int(generator.integers(1, 5)),
            "accumulate": int(generator.integers(1, 4)),
            "seed": int(generator.integers(0, 9)),
        }
        seen = []
        for rank in range(options["world_size"]):
            plan = stream_of(length_N, rank=rank, **options).plan
            start = int(generator.integers(0, plan.num_micro_batches)) + plan.num_micro_batches
            for begin, end in ((plan.num_micro_batches, start), (start, 2 * plan.num_micro_batches)):
                stream = stream_of(length_N, rank=rank, start=begin, **options)
                ordered = list(stream)
                assert [batch.index for batch in ordered] == list(range(begin, begin + len(ordered)))
                assert len(ordered) == len(stream)
                for batch in ordered[: end - begin]:
                    seen += numbers_in(batch)
        assert sorted(seen) == list(range(len(length_N)))


@pytest.mark.parametrize("num_workers", [1, 2, 16])
def test_a_thread_gives_the_order_and_content_of_the_calling_one(num_workers):
    length_N = np.random.default_rng(0).integers(2, 30, 50)
    stream = stream_of(length_N, accumulate=2, start=3)
    alone = list(PackedLoader(lambda: stream, num_batches=20))
    ahead = list(PackedLoader(lambda: stream, num_batches=20, num_workers=num_workers))
    assert [batch.index for batch in ahead] == [batch.index for batch in alone]
    for batch, other in zip(ahead, alone, strict=True):
        assert torch.equal(batch["input_ids"], other["input_ids"])
        assert torch.equal(batch["labels"], other["labels"])
        assert batch["num_items_in_batch"] == other["num_items_in_batch"]
        # The loss head knows a batch's own labels by their memory.
        assert batch["labels"].data_ptr() == batch.context.label_T.data_ptr()


def test_loader_starts_one_thread_and_no_process():
    iterator = iter(PackedLoader(lambda: stream_of([5] * 99), num_batches=9, num_workers=3))
    before = set(loader_threads())
    next(iterator)
    assert len(set(loader_threads()) - before) == 1
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("num_ahead", [1, 3])
def test_thread_stays_at_most_so_many_items_ahead_and_items_are_taken_in_order(num_ahead):
    made = []
    items = prefetch((made.append(number) or number for number in range(20)), num_ahead=num_ahead)
    for taken in range(20):
        assert next(items) == taken
        # What was asked for before this item was taken, and the one behind it.
        assert len(made) <= taken + 1 + num_ahead
    assert list(items) == []
    assert made == list(range(20))


def test_error_of_the_thread_comes_at_its_batch_with_its_traceback():
    def broken():
        yield from range(NUM_AHEAD + 2)
        raise ValueError("planted")

    taken = []
    items = map(taken.append, prefetch(broken()))
    with pytest.raises(ValueError, match="planted") as caught:
        list(items)
    assert taken == list(range(NUM_AHEAD + 2))
    assert "in broken" in "".join(traceback.format_exception(caught.value))


def consume_wrongly(items):
    for _ in items:
        1 / 0  # noqa: B018


@pytest.mark.parametrize("how", ["closed", "dropped", "dropped in a circle", "error of the consumer"])
def test_thread_ends_with_the_iterator(how):
    before = set(loader_threads())
    items = iter(PackedLoader(lambda: stream_of([5] * 999), num_batches=99, num_workers=1))
    next(items)
    own = set(loader_threads()) - before
    if how == "closed":
        items.close()
    elif how == "dropped in a circle":
        circle = [items]
        circle.append(circle)
        del circle
    elif how == "error of the consumer":
        with pytest.raises(ZeroDivisionError):
            consume_wrongly(items)
        items = None
    if how.startswith("dropped"):
        del items
        gc.collect()
    assert len(own) == 1
    assert have_ended(own)


def test_closing_drops_the_items_that_wait_for_the_thread():
    gate, made = threading.Event(), []

    def items_behind_a_gate():
        for number in range(20):
            if number:
                gate.wait()
            made.append(number)
            yield number

    items = prefetch(items_behind_a_gate(), num_ahead=4)
    assert next(items) == 0
    items.close()
    gate.set()
    assert have_ended(loader_threads())
    # At most the one that the thread had begun.
    assert len(made) <= 2


@pytest.mark.fault
def test_interpreter_ends_with_an_iterator_open():
    program = (
        "from lightning_fastft.packing.loader import prefetch; import itertools; items = "
        "prefetch(itertools.count()); print(next(items))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "0\n", "")


def test_calls_around_a_batch_are_made_by_the_thread_that_takes_it():
    called = []
    loader = PackedLoader(
        lambda: stream_of([30] * 3),
        num_batches=3,
        num_workers=1,
        before_batch=lambda: called.append(("before", threading.get_ident())),
        after_batch=lambda _: called.append(("after", threading.get_ident())),
    )
    for _ in loader:
        assert called[-1] == ("before", threading.get_ident())
    assert called == [("before", threading.get_ident()), ("after", threading.get_ident())] * 3


def test_pinning_without_a_device_is_said_and_changes_nothing(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.warns(UserWarning, match="pin_memory"):
        assert len(list(PackedLoader(lambda: stream_of([5, 5, 5]), num_batches=1, num_workers=1, pin_memory=True))) == 1


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
    shapes = {
        batch["input_ids"].shape
        for batch in stream_of([5, 6, 7, 30], max_tokens=32, world_size=3, pad_to=32, pad_token_id=9)
    }
    assert shapes == {(1, 32)}


def test_empty_pack_is_padding_with_a_loss_of_zero():
    batches = [next(iter(stream_of([5], world_size=2, rank=rank))) for rank in (0, 1)]
    empty = min(batches, key=lambda batch: batch.context.num_labelled)
    assert numbers_in(empty) == []
    assert empty.context.num_labelled == 0
    assert (
        empty["num_items_in_batch"]
        == max(batches, key=lambda batch: batch.context.num_labelled)["num_items_in_batch"]
        == 2.0
    )


def test_repeat_first_epoch_gives_the_same_order_under_new_indices():
    length_N = np.random.default_rng(0).integers(2, 30, 50)
    first = list(stream_of(length_N, repeat_first_epoch=True))
    second = list(stream_of(length_N, repeat_first_epoch=True, start=len(first)))
    assert [numbers_in(batch) for batch in first] == [numbers_in(batch) for batch in second]
    assert second[0].index == len(first)
    assert [numbers_in(batch) for batch in stream_of(length_N, start=len(first))] != [
        numbers_in(batch) for batch in first
    ]


@pytest.mark.gpu
def test_loader_pins_what_it_hands_out():
    loader = PackedLoader(lambda: stream_of([5, 5, 5]), num_batches=1, num_workers=1, pin_memory=True)
    batch = next(iter(loader))
    assert batch["input_ids"].is_pinned()
    assert batch.context.position_T.is_pinned()
    assert batch["labels"].data_ptr() == batch.context.label_T.data_ptr()
