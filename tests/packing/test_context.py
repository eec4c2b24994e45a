"""BatchContext: what it refuses, what it builds, and that it builds it once."""

import copy

import pytest
import torch

from lightning_fastft.core.errors import OptionError, ShapeError
from lightning_fastft.packing.context import BLOCK_SIZE, LABELLED_ROW_BUCKET, BatchContext


def make_context(lengths, num_pad_tokens=0):
    label_T = torch.arange(sum(lengths))
    starts = torch.tensor([0, *lengths]).cumsum(0)[:-1]
    label_T[starts] = -100
    if num_pad_tokens:
        label_T[-num_pad_tokens:] = -100
    return BatchContext(lengths=lengths, label_T=label_T, num_pad_tokens=num_pad_tokens, num_items=3)


def plain_mask(lengths, window=None):
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    index = torch.arange(len(document))
    seen = (document[:, None] == document[None, :]) & (index[None, :] <= index[:, None])
    return seen if window is None else seen & (index[:, None] - index[None, :] < window)


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([3, 0, 2], "at least one token"),
        ([], "at least one document"),
        ([2, 2], "sum to"),
        ([-1, 6], "at least one token"),
    ],
)
def test_context_refuses_impossible_lengths(lengths, message):
    with pytest.raises(ShapeError, match=message):
        BatchContext(lengths=lengths, label_T=torch.full((5,), -100), num_items=1)


def test_context_refuses_a_label_across_a_border():
    with pytest.raises(ShapeError, match="document 1 is labelled"):
        BatchContext(lengths=[2, 2], label_T=torch.tensor([-100, 5, 5, 5]), num_items=1)


def test_context_refuses_a_pad_tail_inside_a_document():
    with pytest.raises(ShapeError, match="pad tail of 1"):
        BatchContext(lengths=[2, 2], label_T=torch.full((4,), -100), num_pad_tokens=1, num_items=1)


def test_context_refuses_trained_padding():
    with pytest.raises(ShapeError, match="trained labels"):
        BatchContext(lengths=[2, 2], label_T=torch.tensor([-100, -100, -100, 7]), num_pad_tokens=2, num_items=1)


@pytest.mark.parametrize("num_items", [0, -1, float("nan"), float("inf")])
def test_context_refuses_a_divisor_that_makes_no_sense(num_items):
    with pytest.raises(OptionError, match="num_items"):
        BatchContext(lengths=[2], label_T=torch.tensor([-100, 1]), num_items=num_items)


def test_context_describes_the_pack():
    context = make_context([3, 1, 4, 2], num_pad_tokens=2)
    assert context.start_S1.tolist() == [0, 3, 4, 8, 10]
    assert context.start_S1.dtype is torch.int32
    assert context.position_T.tolist() == [0, 1, 2, 0, 0, 1, 2, 3, 0, 1]
    assert context.document_T.tolist() == [0, 0, 0, 1, 2, 2, 2, 2, 3, 3]
    assert (context.max_length, context.num_real_tokens, context.sum_squared_lengths) == (4, 8, 30)


def test_labelled_rows_point_one_token_before_their_target():
    context = make_context([3, 1, 4])
    count = context.num_labelled
    assert context.labelled_row_R[:count].tolist() == [0, 1, 4, 5, 6]
    assert torch.equal(context.labelled_target_R[:count], context.label_T[context.labelled_row_R[:count] + 1])
    assert len(context.labelled_row_R) % LABELLED_ROW_BUCKET == 0
    assert (context.labelled_target_R[count:] == -100).all()


def test_context_without_labels_has_no_rows():
    context = BatchContext(lengths=[2], label_T=torch.tensor([-100, -100]), num_items=1)
    assert context.num_labelled == 0
    assert context.labelled_row_R.shape == (0,)


@pytest.mark.parametrize("window", [None, 1, 2, 50, 127, 128, 129, 400])
@pytest.mark.parametrize("lengths", [[1], [127, 1], [128], [129, 300, 1, 5], [3] * 100, [BLOCK_SIZE] * 3])
def test_masks_equal_the_definition(lengths, window):
    context = make_context(lengths)
    truth = plain_mask(lengths, window)
    assert torch.equal(context.dense_mask(window=window)[0, 0], truth)
    additive = context.dense_mask(window=window, dtype=torch.float32)[0, 0]
    assert torch.equal(additive == 0, truth)
    assert additive.min() >= torch.finfo(torch.float32).min
    num_blocks = -(-len(truth) // BLOCK_SIZE)
    room = num_blocks * BLOCK_SIZE - len(truth)
    padded = torch.nn.functional.pad(truth, (0, room, 0, room))
    blocks = padded.view(num_blocks, BLOCK_SIZE, num_blocks, BLOCK_SIZE)
    mask = context.block_mask(window=window)
    assert torch.equal(mask.to_dense()[0, 0].bool(), blocks.any(3).any(1))
    full = torch.zeros(num_blocks, num_blocks, dtype=torch.bool)
    for row in range(num_blocks):
        full[row, mask.full_kv_indices[0, 0, row, : mask.full_kv_num_blocks[0, 0, row]].long()] = True
    assert torch.equal(full, blocks.all(3).all(1))


def test_masks_are_built_once_per_distinct_window():
    context = make_context([5, 9])
    for _ in range(3):
        for window in (None, 4, 9, 100):
            context.dense_mask(window=window)
            context.block_mask(window=window)
            context.varlen()
    # A window of 9 or more hides nothing in documents of at most 9 tokens: it is the full mask.
    assert context.num_builds == {"dense_mask": 2, "block_mask": 2, "varlen": 1}


def test_a_moved_context_keeps_its_numbers_and_drops_its_masks():
    context = make_context([5, 9], num_pad_tokens=9)
    context.dense_mask()
    moved = context.to("meta")
    assert moved.start_S1.device.type == "meta"
    assert moved.start_host_S1.tolist() == [0, 5, 14]
    assert (moved.max_length, moved.num_labelled, moved.num_pad_tokens) == (9, 4, 9)
    assert not moved.num_builds
    assert moved.label_T.device.type == "meta"
    assert context.to("cpu") is context


def test_a_window_below_one_is_refused():
    with pytest.raises(OptionError, match="at least 1"):
        make_context([4]).dense_mask(window=0)


def test_context_survives_a_copy_through_a_worker():
    context = copy.deepcopy(make_context([5, 9]))
    assert torch.equal(context.dense_mask()[0, 0], plain_mask([5, 9]))
