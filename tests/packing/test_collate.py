"""collate and PackedBatch: every token once, borders unlabelled, the shape that Lightning and models expect."""

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch.utilities.data import extract_batch_size

from lightning_fastft.core.errors import ShapeError
from lightning_fastft.packing.collate import Document, PackedBatch, collate
from tests.support.packs import make_groups, separate


def make_documents(lengths, seed=0):
    rng = np.random.default_rng(seed)
    documents = []
    for length in lengths:
        ids = rng.integers(1, 100, length)
        documents.append(Document(ids, np.where(rng.random(length) < 0.5, ids, -100)))
    return documents


@pytest.mark.parametrize("lengths", [[1], [7], [3, 1, 40], [13] * 17])
@pytest.mark.parametrize("room", [0, 1, 64])
def test_collate_keeps_every_token_once(lengths, room):
    documents = make_documents(lengths)
    batch = collate(documents, pad_to=sum(lengths) + room)
    context = batch.context
    for number, document in enumerate(documents):
        start, end = context.start_host_S1[number : number + 2].tolist()
        assert batch["input_ids"][0, start:end].tolist() == document.input_ids.tolist()
        assert batch["labels"][0, start:end].tolist() == [-100, *document.labels[1:].tolist()]
        assert batch["position_ids"][0, start:end].tolist() == list(range(end - start))
    assert context.num_pad_tokens == room
    assert (batch["labels"][0, sum(lengths) :] == -100).all()
    assert context.max_length == max(lengths)


def test_a_pack_of_padding_alone_is_allowed_and_trains_nothing():
    batch = collate([], pad_to=12)
    assert batch.context.num_real_tokens == 0
    assert batch.context.num_labelled == 0


def test_collate_refuses_what_does_not_fit():
    with pytest.raises(ShapeError, match="pad_to=5"):
        collate(make_documents([6]), pad_to=5)
    with pytest.raises(ShapeError, match="2 ids and 3 labels"):
        collate([Document(np.array([1, 2]), np.array([1, 2, 3]))])


def test_divisor_defaults_to_the_labelled_tokens():
    documents = make_documents([30, 20])
    expected = sum(int((document.labels[1:] != -100).sum()) for document in documents)
    assert collate(documents)["num_items_in_batch"] == expected
    assert collate(documents, num_items=2.5)["num_items_in_batch"] == 2.5


def test_batch_unpacks_into_model_arguments():
    batch = collate(make_documents([4, 4]))
    assert set(dict(**batch)) == set(batch.keys())
    assert "input_ids" in batch
    assert "token_type_ids" not in batch
    assert [key for key, _ in batch.items()] == list(batch.keys())
    assert all(value is batch[key] for key, value in batch.items() if key != "attention_mask")
    assert batch["use_cache"] is False
    assert batch["attention_mask"].tolist() == [[1] * 8]
    assert batch["labels"].data_ptr() == batch.context.label_T.data_ptr()


def test_the_mask_is_zero_at_the_pad_tail():
    assert collate(make_documents([2, 3]), pad_to=8)["attention_mask"].tolist() == [[1] * 5 + [0] * 3]


def test_lightning_reads_the_divisor_of_the_loss_as_the_batch_size():
    batch = collate(make_documents([40, 30]))
    assert extract_batch_size(batch) == batch.context.num_labelled > 0
    assert extract_batch_size(collate(make_documents([40, 30]), num_items=7.75)) == 8
    assert extract_batch_size(collate(make_documents([4]), num_items=0.25)) == 1


def test_lightning_moves_the_batch_with_its_context():
    batch = collate(make_documents([4, 4]), index=3)
    moved = move_data_to_device(batch, torch.device("meta"))
    assert isinstance(moved, PackedBatch)
    assert moved["input_ids"].device.type == moved.context.start_S1.device.type == "meta"
    assert moved["context"] is moved.context
    assert moved.index == 3
    assert moved["position_ids"].shape == (1, 8)


@pytest.mark.gpu
def test_pinned_batch_moves_without_waiting():
    batch = collate(make_documents([400, 300])).pin_memory()
    assert batch["input_ids"].is_pinned()
    assert batch.context.labelled_row_R.is_pinned()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        moved = batch.to("cuda")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(moved["labels"].cpu(), batch["labels"])


def test_completions_stand_behind_a_prompt_that_is_there_once():
    ids = np.array([1, 2, 3, 7, 8, 9])
    document = Document(ids, np.array([-100, -100, -100, 7, -100, 9]), segment_lengths=(3, 1, 2), scores=(1.0, 0.0))
    batch = collate([document], pad_to=10)
    assert batch["input_ids"].tolist() == [[1, 2, 3, 7, 3, 8, 9, 0, 0, 0]]
    assert batch["labels"].tolist() == [[-100, -100, -100, 7, -100, -100, 9, -100, -100, -100]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 2, 3, 4, 0, 1, 2]]
    assert batch.context.prefixes == (-1, 0, 0, -1)
    completions = batch.context.completions
    assert completions.completions_per_example == (2,)
    assert completions.count_C.tolist() == [1.0, 1.0]
    assert completions.score_C.tolist() == [1.0, 0.0]
    assert completions.log_prob_R is None


def test_unshared_completions_have_a_copy_of_their_prompt():
    documents = make_groups()
    batch, plain = collate(documents, shares_prompts=False), collate(separate(documents))
    for key in ("input_ids", "labels", "position_ids"):
        assert torch.equal(batch[key], plain[key])
    assert not batch.context.has_prefixes
    assert batch.context.completions.completions_per_example == (2, 2, 3, 1)


@pytest.mark.parametrize("shares_prompts", [True, False])
def test_labelled_rows_know_their_completion(shares_prompts):
    documents = make_groups()
    batch = collate(documents, shares_prompts=shares_prompts, numbers=[4, 2, 9, 0])
    context, completions = batch.context, batch.context.completions
    assert batch.numbers == batch.to("meta").numbers == (4, 2, 9, 0)
    rows = context.labelled_target_R[: context.num_labelled]
    lengths = [length for document in documents for length in document.segment_lengths[1:]]
    assert completions.completion_R[: context.num_labelled].tolist() == [
        number for number, length in enumerate(lengths) for _ in range(length)
    ]
    assert (completions.completion_R[context.num_labelled :] == len(lengths)).all()
    truth = np.concatenate([document.input_ids[document.segment_lengths[0] :] for document in documents])
    assert rows.tolist() == truth.tolist()
    known = np.concatenate([document.log_probs[document.segment_lengths[0] :] for document in documents])
    assert np.array_equal(completions.log_prob_R[: context.num_labelled].numpy(), known)
    assert completions.sum(completions.log_prob_R).tolist() == pytest.approx(
        [float(part.sum()) for part in np.split(known, np.cumsum(lengths)[:-1])], rel=1e-6
    )
    moved = batch.to("meta").context.completions
    assert moved.score_C.device.type == moved.log_prob_R.device.type == "meta"


def test_collate_refuses_completions_that_do_not_fit():
    ids = np.arange(4)
    with pytest.raises(ShapeError, match="add up"):
        collate([Document(ids, ids, segment_lengths=(2, 1), scores=(0.0,))])
    with pytest.raises(ShapeError, match="unlike document 0"):
        collate([Document(ids, ids), Document(ids, ids, segment_lengths=(2, 2), scores=(0.0,))])
    with pytest.raises(ShapeError, match="scores"):
        collate([Document(ids, ids, segment_lengths=(2, 2), scores=())])


@pytest.mark.parametrize(("pad_to", "expected"), [(None, 8), (9, 12), (12, 12)])
def test_packs_are_padded_to_a_multiple(pad_to, expected):
    batch = collate(make_documents((3, 2)), pad_to=pad_to, pad_to_multiple_of=4)
    assert batch.context.num_tokens == expected
    assert batch.context.num_real_tokens == 5


def test_packs_with_completions_are_not_cut():
    with pytest.raises(ShapeError, match="completions"):
        collate(make_groups(), pad_to_multiple_of=2, shares_prompts=False).cut(0, num_parts=2)
