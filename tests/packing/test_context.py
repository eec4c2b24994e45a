"""BatchContext: what it refuses, what it builds, and that it builds it once."""

import copy
import inspect
import re

import pytest
import torch

from lightning_fastft.core.errors import ContextError, OptionError, ShapeError
from lightning_fastft.packing.context import BatchContext
from lightning_fastft.packing.context_content import LABELLED_ROW_BUCKET
from lightning_fastft.packing.masks import BLOCK_SIZE, KEY_STEP
from lightning_fastft.packing.spans import BidirectionalSpans


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


def test_every_public_attribute_is_documented():
    names = {name for name in (*vars(make_context([3, 1])), *inspect.get_annotations(BatchContext)) if name[0] != "_"}
    assert names <= set(re.findall(r"^    (\w+): ", inspect.getdoc(BatchContext), flags=re.MULTILINE))


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


def check_mask_blocks(context, truth, *, window, num_rows):
    """Blocks hold the rows of the truth, their keys hold all that is seen, and no more than asked before a block."""
    rest = truth.clone()
    for queries, keys, mask_11RK in context.mask_blocks(window=window, dtype=torch.bool, num_rows=num_rows):
        assert torch.equal(mask_11RK[0, 0], truth[queries, keys])
        assert keys.start % KEY_STEP == 0
        rest[queries, keys] = False
    assert not rest.any()


@pytest.mark.parametrize("window", [None, 1, 50, 400])
@pytest.mark.parametrize("num_rows", [1, 16, 130, 1000])
@pytest.mark.parametrize("lengths", [[1], [127, 1], [129, 300, 1, 5], [3] * 100])
def test_blocks_of_a_mask_equal_the_definition(lengths, num_rows, window):
    check_mask_blocks(make_context(lengths), plain_mask(lengths, window), window=window, num_rows=num_rows)


def test_a_block_reaches_no_further_than_its_first_document():
    blocks = make_context([40, 100, 60]).mask_blocks(dtype=torch.float32, num_rows=64)
    assert [(queries.start, keys.start, keys.stop) for queries, keys, _ in blocks] == [
        (0, 0, 64), (64, 32, 128), (128, 32, 192), (192, 128, 200),
    ]  # fmt: skip


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


def prefixed(lengths, prefixes):
    return BatchContext(lengths=lengths, label_T=torch.full((sum(lengths),), -100), num_items=1, prefixes=prefixes)


def prefixed_mask(lengths, prefixes, window=None):
    """Who sees whom by positions: a loop over documents that shares no code with the package."""
    starts = [sum(lengths[:number]) for number in range(len(lengths))]
    seen = torch.zeros(sum(lengths), sum(lengths), dtype=torch.bool)
    for start, length, prefix in zip(starts, lengths, prefixes):
        before = [] if prefix < 0 else list(range(starts[prefix], starts[prefix] + lengths[prefix]))
        for query in range(length):
            keys = [*before, *range(start, start + query + 1)]
            seen[start + query, keys if window is None else keys[-window:]] = True
    return seen


PREFIXED = {
    "pair": ([3, 2, 4], [-1, 0, 0]),
    "two groups and a plain document": ([3, 2, 4, 5, 1, 2, 6], [-1, 0, 0, -1, 3, 3, -1]),
    "long prompt": ([300, 5, 140, 130], [-1, 0, 0, -1]),
    "many short groups": ([5, 2, 2] * 40, [-1, 0, 0, *(x for g in range(1, 40) for x in (-1, 3 * g, 3 * g))]),
    "whole blocks": ([BLOCK_SIZE * 2, BLOCK_SIZE, BLOCK_SIZE], [-1, 0, 0]),
}


@pytest.mark.parametrize("window", [None, 1, 3, 130])
@pytest.mark.parametrize("case", PREFIXED)
def test_masks_with_prefixes_equal_the_definition(case, window):
    lengths, prefixes = PREFIXED[case]
    context = prefixed(lengths, prefixes)
    truth = prefixed_mask(lengths, prefixes, window)
    assert torch.equal(context.dense_mask(window=window)[0, 0], truth)
    check_mask_blocks(context, truth, window=window, num_rows=48)
    num_blocks = -(-len(truth) // BLOCK_SIZE)
    room = num_blocks * BLOCK_SIZE - len(truth)
    blocks = torch.nn.functional.pad(truth, (0, room, 0, room)).view(num_blocks, BLOCK_SIZE, num_blocks, BLOCK_SIZE)
    mask = context.block_mask(window=window)
    assert torch.equal(mask.to_dense()[0, 0].bool(), blocks.any(3).any(1))
    index = torch.arange(len(truth))
    by_function = mask.mask_mod(torch.tensor(0), torch.tensor(0), index[:, None], index[None])
    assert torch.equal(by_function, truth)
    for row in range(num_blocks):
        full = mask.full_kv_indices[0, 0, row, : mask.full_kv_num_blocks[0, 0, row]].long()
        assert blocks[row][:, full].all()


@pytest.mark.parametrize("case", PREFIXED)
def test_keys_of_a_document_are_its_prefix_and_itself(case):
    lengths, prefixes = PREFIXED[case]
    context = prefixed(lengths, prefixes)
    keys, starts = context.prefix_keys, context.start_host_S1.tolist()
    for number, prefix in enumerate(prefixes):
        rows = keys.row_N[keys.start_S1[number] : keys.start_S1[number + 1]].tolist()
        before = [] if prefix < 0 else list(range(starts[prefix], starts[prefix + 1]))
        assert rows == [*before, *range(starts[number], starts[number + 1])]
    for row, places in enumerate(keys.place_TK.tolist()):
        assert [place for place in places if place < len(keys.row_N)] == (keys.row_N == row).nonzero()[:, 0].tolist()


def test_positions_go_on_from_the_prefix():
    context = prefixed([3, 2, 4, 2], [-1, 0, 0, -1])
    assert context.position_T.tolist() == [0, 1, 2, 3, 4, 3, 4, 5, 6, 0, 1]
    assert (context.max_length, context.max_own_length) == (7, 4)
    # Scores of a document that sees P tokens before its own L are those of P * L and half of L * L.
    assert context.sum_squared_lengths == 9 + 2 * (2 + 6) + 4 * (4 + 6) + 4
    assert context.varlen().max_length == 4
    assert context.varlen().max_key_length == 7
    assert context.varlen().key_start_S1.tolist() == [0, 3, 8, 15, 17]
    assert context.to("meta").prefix_keys.row_N.device.type == "meta"


@pytest.mark.parametrize("prefixes", [[0, -1, -1], [-1, 2, -1], [-1, 0, 1], [-1, 0], [-2, -1, -1]])
def test_context_refuses_impossible_prefixes(prefixes):
    with pytest.raises(ShapeError, match="prefix"):
        prefixed([2, 2, 2], prefixes)


def test_prefixes_are_not_recorded():
    with pytest.raises(ShapeError, match="prefixes"):
        prefixed([2, 2], [-1, 0]).recordable(num_documents=2, max_length=4)
    recorded = prefixed([2, 2], [-1, -1]).recordable(num_documents=2, max_length=4)
    with pytest.raises(ShapeError):
        recorded.load(prefixed([2, 2], [-1, 0]))


def with_spans(lengths, ranges, *, in_windows_only=False):
    context = make_context(lengths)
    context.spans = BidirectionalSpans.build(
        ranges, in_windows_only=in_windows_only, document_T=context.document_T.clone()
    )
    return context


def spans_mask(lengths, ranges, window=None):
    """Who sees whom, by transformers' rule: causal or of the same image, and not before the window."""
    seen = plain_mask(lengths)
    for begin, end in ranges:
        seen[begin:end, begin:end] = True
    index = torch.arange(len(seen))
    return seen if window is None else seen & (index[:, None] - index[None, :] < window)


SPANS = {
    "one": ([9], [(2, 6)]),
    "whole documents": ([3, 4], [(0, 3), (3, 7)]),
    "two in a document": ([20, 5, 30], [(1, 4), (5, 9), (26, 50)]),
    "over blocks of queries": ([129, 300, 1, 5], [(100, 129), (140, 400)]),
    "whole blocks": ([BLOCK_SIZE * 3], [(0, BLOCK_SIZE * 2)]),
}


@pytest.mark.parametrize("window", [None, 1, 3, 130, 400])
@pytest.mark.parametrize("case", SPANS)
def test_masks_with_spans_equal_the_definition(case, window):
    lengths, ranges = SPANS[case]
    context, truth = with_spans(lengths, ranges), spans_mask(lengths, ranges, window)
    assert torch.equal(context.dense_mask(window=window)[0, 0], truth)
    for num_rows in (1, 48, 130):
        check_mask_blocks(context, truth, window=window, num_rows=num_rows)
    num_blocks = -(-len(truth) // BLOCK_SIZE)
    room = num_blocks * BLOCK_SIZE - len(truth)
    blocks = torch.nn.functional.pad(truth, (0, room, 0, room)).view(num_blocks, BLOCK_SIZE, num_blocks, BLOCK_SIZE)
    mask = context.block_mask(window=window)
    shown = mask.to_dense()[0, 0].bool()
    assert torch.equal(shown | blocks.any(3).any(1), shown)
    index = torch.arange(len(truth))
    assert torch.equal(mask.mask_mod(torch.tensor(0), torch.tensor(0), index[:, None], index[None]), truth)
    for row in range(num_blocks):
        full = mask.full_kv_indices[0, 0, row, : mask.full_kv_num_blocks[0, 0, row]].long()
        assert blocks[row][:, full].all()


def test_spans_of_windows_leave_other_layers_causal():
    lengths, ranges = SPANS["two in a document"]
    context = with_spans(lengths, ranges, in_windows_only=True)
    # The longest document has 30 tokens, so this window hides nothing, and layers with it have the spans.
    for window in (3, 100):
        assert torch.equal(context.dense_mask(window=window)[0, 0], spans_mask(lengths, ranges, window))
    assert torch.equal(context.dense_mask()[0, 0], plain_mask(lengths))
    assert torch.equal(context.block_mask().to_dense(), make_context(lengths).block_mask().to_dense())
    moved = context.to("meta")
    assert moved.spans.last_T.is_meta
    assert moved.spans.ranges == tuple(ranges)


@pytest.mark.parametrize("ranges", [[(0, 0)], [(2, 1)], [(1, 4)], [(0, 2), (1, 3)], [(5, 9)], [(-1, 1)]])
def test_impossible_spans_are_refused(ranges):
    with pytest.raises(ShapeError, match="span"):
        with_spans([3, 4], ranges)


def test_spans_are_neither_recorded_nor_cut():
    context = with_spans([3, 3], [(0, 2)])
    with pytest.raises(ShapeError, match="directions"):
        context.recordable(num_documents=2, max_length=4)
    with pytest.raises(ShapeError):
        make_context([3, 3]).recordable(num_documents=2, max_length=4).load(context)
    with pytest.raises(ShapeError, match="directions"):
        context.cut(0, num_parts=2)


@pytest.mark.parametrize("num_parts", [1, 2, 3, 6])
def test_parts_hold_every_row_and_its_label_once(num_parts):
    whole = make_context([5, 1, 2, 9, 1], num_pad_tokens=1)
    parts = [whole.cut(rank, num_parts=num_parts) for rank in range(num_parts)]
    for name in ("position_T", "document_T", "label_T"):
        assert torch.equal(torch.cat([getattr(part, name) for part in parts]), getattr(whole, name))
    found = [
        (part.part.rows.start + row, target)
        for part in parts
        for row, target in zip(
            part.labelled_row_R[: part.num_labelled].tolist(), part.labelled_target_R[: part.num_labelled].tolist()
        )
    ]
    count = whole.num_labelled
    assert found == list(zip(whole.labelled_row_R[:count].tolist(), whole.labelled_target_R[:count].tolist()))
    for name in ("num_tokens", "num_real_tokens", "num_pad_tokens", "num_labelled"):
        assert sum(getattr(part, name) for part in parts) == getattr(whole, name)
    assert all((part.num_items, part.whole) == (whole.num_items, whole) for part in parts)


def test_a_part_moves_with_its_pack_and_counts_reads_there():
    part = make_context([4, 4]).cut(1, num_parts=2).to("meta")
    assert part.label_T.device == part.whole.label_T.device == torch.device("meta")
    assert part.position_T.shape == (4,)
    part.whole.note_read("reference")
    assert part.num_reads == 1


@pytest.mark.parametrize(
    ("context", "num_parts", "message"),
    [
        (make_context([4, 3]), 2, r"pad_to_multiple_of=2"),
        (make_context([4, 4]).to("meta"), 2, "on the host"),
        (
            BatchContext(lengths=[2, 2], label_T=torch.full((4,), -100), num_items=1, prefixes=[-1, 0]),
            2,
            "continue prefixes",
        ),
    ],
)
def test_packs_that_cannot_be_cut_are_refused(context, num_parts, message):
    with pytest.raises(ShapeError, match=message):
        context.cut(0, num_parts=num_parts)


def test_masks_of_a_part_are_refused():
    part = make_context([4, 4]).cut(0, num_parts=2)
    with pytest.raises(ContextError, match=r"context\.whole"):
        part.dense_mask()
