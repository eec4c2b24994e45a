"""Layers that read the same rows: adapters inside the base's product where rows are many, beside it where they
are few, with the same numbers.
"""

import dataclasses
import gc
import weakref

import pytest
import torch
from torch import nn

from lightning_fastft.fused import dense_weights, linear_gradients, linears
from lightning_fastft.fused.dense_weights import DenseWeights, PaddedBuffer
from lightning_fastft.fused.linear_parts import LinearPart
from lightning_fastft.fused.linears import FusedLinear
from lightning_fastft.kernels.low_rank_add.op import add_low_rank
from tests.support.truth import fresh_memory_is_nan

NUM_INPUTS, NUM_OUTPUTS, RANKS = 24, (40, 8, 16), (4, 0, 3)
MANY = linears.COPIED_FROM_ROWS_PER_INPUT * NUM_INPUTS


def make_joint(*, dtype=torch.float32, is_trained=False, num_inputs=NUM_INPUTS, stride=0):
    """Three layers, the second without an adapter; with a stride, weights whose rows are apart."""
    generator = torch.Generator().manual_seed(0)

    def numbers(*shape):
        return torch.randn(shape, generator=generator).to(dtype)

    parts = []
    for place, (num_outputs, rank) in enumerate(zip(NUM_OUTPUTS, RANKS)):
        base = nn.Linear(num_inputs, num_outputs, bias=place == 2, dtype=dtype).requires_grad_(
            is_trained and place == 0
        )
        base.weight.data = numbers(num_outputs, num_inputs + stride)[:, :num_inputs]
        a_RI, b_OR = (numbers(rank, num_inputs), numbers(num_outputs, rank)) if rank else (None, None)
        parts.append(LinearPart(base, base.weight, base.bias, a_RI, b_OR, a_RI, b_OR, 0.5 + place, num_outputs, False))
    return FusedLinear(tuple(parts), DenseWeights())


@torch.no_grad()
def run(fused_linear, num_rows, *, has_room=True):
    """Output, low-rank rows, and the gradients of rows and low-rank rows."""
    generator = torch.Generator().manual_seed(1)
    like_TI = torch.randn(num_rows, fused_linear.num_inputs, generator=generator).to(fused_linear.parts[0].weight.dtype)
    x_TI = linears.rows_for(fused_linear, like_TI).copy_(like_TI) if has_room else like_TI.clone()
    y_TO, *low = linears.product(fused_linear, x_TI)
    low_TR = low[0] if low else None
    d_TO = torch.randn(y_TO.shape, generator=generator).to(like_TI.dtype)
    return x_TI, d_TO, (y_TO, low_TR, *linear_gradients.rows_gradients(fused_linear, d_TO, needs_x=True))


def truth(fused_linear, x_TI, d_TO):
    """The same in float64, from the definition."""
    x_TI, d_TO = x_TI.double(), d_TO.double()
    y, low, d_low, d_x, start = [], [x_TI[:, :0]], [x_TI[:, :0]], 0.0, 0
    for part in fused_linear.parts:
        d_piece, weight_OI = d_TO[:, start : start + part.num_outputs], part.weight.detach().double()
        start += part.num_outputs
        y.append(x_TI @ weight_OI.T + (0.0 if part.bias is None else part.bias.detach().double()))
        d_x = d_x + d_piece @ weight_OI
        if part.rank:
            low.append(part.scale * x_TI @ part.a_RI.double().T)
            d_low.append(part.scale * d_piece @ part.b_OR.double())
            y[-1] = y[-1] + low[-1] @ part.b_OR.double().T
            d_x = d_x + d_low[-1] @ part.a_RI.double()
    return torch.cat(y, 1), torch.cat(low, 1), d_x, torch.cat(d_low, 1)


def check(fused_linear, num_rows, *, tolerance=1e-6, **options):
    x_TI, d_TO, found = run(fused_linear, num_rows, **options)
    for one, other in zip(found, truth(fused_linear, x_TI, d_TO), strict=True):
        assert one.shape == other.shape
        assert ((one.double() - other).norm() / other.norm()).item() < tolerance
    _, _, again = run(fused_linear, num_rows, **options)
    assert all(torch.equal(one, other) for one, other in zip(found, again))


@pytest.mark.covering
@pytest.mark.parametrize("num_rows", [1, MANY - 1, MANY, MANY + 17])
@pytest.mark.parametrize("has_room", [False, True])
def test_outputs_and_gradients_are_those_of_the_definition(num_rows, has_room):
    check(make_joint(), num_rows, has_room=has_room)


@torch.no_grad()
@pytest.mark.parametrize("num_rows", [1, MANY - 1, MANY])
def test_gradients_apart_are_those_of_the_definition_once_they_are_added(num_rows):
    fused_linear = make_joint()
    x_TI, d_TO, (_, _, d_x_TI, d_low_TR) = run(fused_linear, num_rows)
    rest_TI, d_low_again_TR, a_RI = linear_gradients.rows_gradients_apart(fused_linear, d_TO)
    _, _, true_d_x_TI, _ = truth(fused_linear, x_TI, d_TO)
    whole_TI = rest_TI.double() + d_low_again_TR.double() @ a_RI.double()
    assert ((whole_TI - true_d_x_TI).norm() / true_d_x_TI.norm()).item() < 1e-6
    assert torch.equal(d_low_again_TR, d_low_TR)
    assert torch.equal(add_low_rank(rest_TI, d_low_again_TR, a_RI), d_x_TI)


def test_without_adapters_nothing_is_left_apart():
    fused_linear = make_joint()
    bare = dataclasses.replace(fused_linear, parts=fused_linear.parts[1:2])
    d_TO = torch.randn(5, NUM_OUTPUTS[1])
    rest_TI, d_low_TR, a_RI = linear_gradients.rows_gradients_apart(bare, d_TO)
    assert d_low_TR is a_RI is None
    assert torch.equal(rest_TI, linear_gradients.rows_gradients(bare, d_TO, needs_x=True)[0])


def make_down(*, rank=4, num_outputs=16, is_trained=False, dtype=torch.float32):
    """One layer that narrows its rows by far."""
    generator = torch.Generator().manual_seed(2)
    base = nn.Linear(48, num_outputs, dtype=dtype).requires_grad_(is_trained)
    a_RI, b_OR = (torch.randn(shape, generator=generator).to(dtype) for shape in ((rank, 48), (num_outputs, rank)))
    return FusedLinear(
        (LinearPart(base, base.weight, base.bias, a_RI, b_OR, a_RI, b_OR, 0.5, num_outputs, False),), DenseWeights()
    )


def check_apart(fused_linear, num_rows, *, is_whole, tolerance=1e-6):
    x_TI, d_TO, (_, _, d_x_TI, d_low_TR) = run(fused_linear, num_rows)
    with torch.no_grad(), fresh_memory_is_nan():
        rest_TI, d_low_again_TR, a_RI = linear_gradients.rows_gradients_apart(fused_linear, d_TO)
    assert (a_RI is None) == is_whole
    true_d_x_TI = truth(fused_linear, x_TI, d_TO)[2]
    whole_TI = rest_TI.double() if a_RI is None else rest_TI.double() + d_low_again_TR.double() @ a_RI.double()
    for found_TI in (whole_TI, d_x_TI.double()):
        assert ((found_TI - true_d_x_TI).norm() / true_d_x_TI.norm()).item() < tolerance
    assert torch.equal(d_low_again_TR, d_low_TR)


# Ranks that fill whole steps of the product and ranks that do not; packed weights, and dense ones with few rows and
# many.
@pytest.mark.covering
@pytest.mark.parametrize("rank", [3, 8, 17])
@pytest.mark.parametrize(
    ("num_rows", "is_packed", "is_whole"), [(31, False, False), (32, False, True), (1, True, True)]
)
def test_a_layer_that_narrows_its_rows_by_far_has_its_adapter_below_its_weight_backward(
    monkeypatch, rank, num_rows, is_packed, is_whole
):
    fused_linear = make_down(rank=rank)
    check_apart(packed(fused_linear, monkeypatch) if is_packed else fused_linear, num_rows, is_whole=is_whole)
    assert [buffer.numel() for buffer in fused_linear.dense.memory()] == (
        [48 * (16 + -(-rank // 8) * 8)] if is_whole else []
    )


def test_in_bf16_the_same_is_as_exact_as_one_rounding():
    check_apart(make_down(dtype=torch.bfloat16), 32, is_whole=True, tolerance=5e-3)


def test_a_layer_that_is_trained_or_as_wide_as_its_rows_keeps_its_adapter_apart():
    check_apart(make_down(is_trained=True), 32, is_whole=False)
    check_apart(make_down(num_outputs=25), 64, is_whole=False)


@pytest.mark.covering
@pytest.mark.parametrize("factor", [1.0, 0.22])
@pytest.mark.parametrize("rank", [None, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_residual_is_added_to_base_and_adapter_times_a_factor(dtype, rank, factor):
    fused_linear = make_down(dtype=dtype)
    if rank is None:
        fused_linear = dataclasses.replace(fused_linear, parts=(without_adapters(fused_linear.parts[0]),))
    generator = torch.Generator().manual_seed(3)
    x_TI, residual_TO = (torch.randn(shape, generator=generator).to(dtype) for shape in ((7, 48), (7, 16)))
    kept_TO = residual_TO.clone()
    y_TO, *low = linears.product(fused_linear, x_TI, addend_TO=residual_TO, factor=factor)
    true_TO, true_low_TR, *_ = truth(fused_linear, x_TI, residual_TO)
    true_TO = factor * true_TO + residual_TO.double()
    assert ((y_TO.double() - true_TO).norm() / true_TO.norm()).item() < (1e-6 if dtype is torch.float32 else 5e-3)
    assert torch.equal(residual_TO, kept_TO)
    assert len(low) == (rank is not None)
    if rank is not None:
        assert ((low[0].double() - true_low_TR).norm() / true_low_TR.norm()).item() < 5e-3


APPENDED = linear_gradients._appended_gradient
APPENDED_FAULTS = {
    "adapter not below the weight": (
        DenseWeights,
        "above_adapter",
        lambda self, part, a_RI: torch.cat([part.weight, torch.zeros(8, 48)]),
    ),
    "low-rank rows not behind the rows": (
        linear_gradients,
        "_appended_gradient",
        lambda fused_linear, d_TO, d_low_TR: APPENDED(fused_linear, d_TO, d_low_TR * 0.0),
    ),
}


@pytest.mark.parametrize("fault", APPENDED_FAULTS)
def test_a_fault_planted_below_the_weight_is_seen(fault, monkeypatch):
    monkeypatch.setattr(*APPENDED_FAULTS[fault])
    with pytest.raises(AssertionError):
        check_apart(make_down(), 32, is_whole=True)


# Settled weights


def buffer_of(weight):
    """The memory that a weight is the beginning of, in rows with the stride of its own."""
    num_columns = weight.stride(0)
    num_rows = weight.untyped_storage().nbytes() // weight.element_size() // num_columns
    return weight.data.as_strided((num_rows, num_columns), (num_columns, 1), 0)


def check_settled(fused_linear):
    check(fused_linear, 1)
    check(fused_linear, MANY)
    assert fused_linear.dense.memory() == []


def test_settled_weights_are_read_where_they_lie():
    fused_linear = make_joint()
    parameters, values = (
        [part.weight for part in fused_linear.parts],
        [part.weight.detach().clone() for part in fused_linear.parts],
    )
    weight_buffer = fused_linear.dense.fuse_buffer(fused_linear.parts)
    memory = buffer_of(fused_linear.parts[0].weight)
    # Seven ranks take eight columns.
    assert memory.shape == (sum(NUM_OUTPUTS), NUM_INPUTS + 8)
    assert all(
        part.base.weight is parameter and part.weight is parameter
        for part, parameter in zip(fused_linear.parts, parameters)
    )
    assert all(torch.equal(parameter, value) for parameter, value in zip(parameters, values))
    check_settled(fused_linear)
    # In place, as merging writes.
    with torch.no_grad():
        parameters[1].mul_(3.0)
    check_settled(fused_linear)

    assert weight_buffer.is_there()

    weight_buffer.give_back()
    assert not weight_buffer.is_there()
    assert not fused_linear.dense.has_room_beside(fused_linear.parts)
    assert all(parameter.untyped_storage().nbytes() == parameter.nbytes for parameter in parameters)
    assert torch.equal(parameters[1], 3.0 * values[1])
    check(fused_linear, MANY)
    assert len(fused_linear.dense.memory()) == 1


@pytest.mark.parametrize("is_settled", [False, True])
def test_the_adapter_of_one_layer_that_widens_its_rows_rides_along(is_settled):
    fused_linear = make_joint()
    fused_linear = dataclasses.replace(fused_linear, parts=fused_linear.parts[:1])
    assert fused_linear.parts[0].num_outputs > NUM_INPUTS
    if is_settled:
        fused_linear.dense.fuse_buffer(fused_linear.parts)
        assert buffer_of(fused_linear.parts[0].weight).shape == (NUM_OUTPUTS[0], NUM_INPUTS + 8)
    check(fused_linear, 1)
    check(fused_linear, MANY)
    assert len(fused_linear.dense.memory()) == (0 if is_settled else 1)


def test_a_settled_layer_has_its_adapter_below_its_weight():
    fused_linear = make_down(rank=3)
    value_OI = fused_linear.parts[0].weight.detach().clone()
    weight_buffer = fused_linear.dense.fuse_buffer(fused_linear.parts)
    assert buffer_of(fused_linear.parts[0].weight).shape == (16 + 8, 48)
    for num_rows in (1, 32):
        check_apart(fused_linear, num_rows, is_whole=True)
    assert fused_linear.dense.memory() == []
    assert torch.equal(fused_linear.parts[0].weight, value_OI)
    weight_buffer.give_back()
    assert fused_linear.parts[0].weight.untyped_storage().nbytes() == value_OI.nbytes
    check_apart(fused_linear, 31, is_whole=False)


# Room behind gradients


@pytest.mark.parametrize("num_inputs_per_output", [1, 3])
def test_gradients_with_room_are_not_copied(monkeypatch, num_inputs_per_output):
    fused_linear = make_down(num_outputs=48 // num_inputs_per_output)
    fused_linear.dense.fuse_buffer(fused_linear.parts)
    d_TO = torch.randn(5, fused_linear.parts[0].num_outputs)
    roomy_TO = linear_gradients.gradients_for(fused_linear, d_TO).copy_(d_TO)
    kept_TO = roomy_TO.clone()
    with torch.no_grad():
        expected = linear_gradients.rows_gradients(fused_linear, d_TO, needs_x=True)
        monkeypatch.setattr(torch.Tensor, "new_empty", lambda *_: pytest.fail("rows are copied"))
        monkeypatch.setattr(linear_gradients, "low_rows_gradient", lambda fused_linear, d_TO: expected[1])
        d_x_TI, _, a_RI = linear_gradients.rows_gradients_apart(fused_linear, roomy_TO)
    assert a_RI is None
    assert ((d_x_TI - expected[0]).norm() / expected[0].norm()).item() < 1e-6
    assert torch.equal(roomy_TO, kept_TO)


def test_a_settled_layer_that_widens_its_rows_copies_no_weight_for_gradients_with_room():
    fused_linear = make_joint()
    fused_linear = dataclasses.replace(fused_linear, parts=fused_linear.parts[:1])
    fused_linear.dense.fuse_buffer(fused_linear.parts)
    d_TO = linear_gradients.gradients_for(fused_linear, torch.empty(3, NUM_OUTPUTS[0])).normal_()
    with torch.no_grad():
        linear_gradients.rows_gradients(fused_linear, d_TO, needs_x=True)
    assert fused_linear.dense.memory() == []


def test_room_is_found_again_in_its_own_rows_alone():
    roomy, like_TD = PaddedBuffer(), torch.ones(4, 16)
    assert not roomy.has_room(like_TD, num_ranks=8)
    rows_TD = roomy.give(like_TD, num_ranks=3)
    assert rows_TD.shape == (4, 16)
    assert roomy.has_room(rows_TD.view(1, 4, 16).view(4, 16), num_ranks=8)
    # Other ranks, some of the rows, some of the columns, rows that somebody else laid the same way, and rows of an
    # earlier call.
    others = [(rows_TD, 9), (rows_TD[1:], 8), (rows_TD[:, :8], 16), (torch.ones(4, 24)[:, :16], 8)]
    assert not any(roomy.has_room(other, num_ranks=num_ranks) for other, num_ranks in others)
    roomy.give(like_TD, num_ranks=3)
    assert not roomy.has_room(rows_TD, num_ranks=3)


def test_weights_that_compute_in_a_format_of_their_own_ask_for_no_room():
    fused_linear, like_TO = make_down(), torch.ones(4, 16)
    assert linear_gradients.gradients_for(fused_linear, like_TO).stride(0) == 16 + 8
    assert linear_gradients.gradients_for(dataclasses.replace(fused_linear, base=object()), like_TO).is_contiguous()


@pytest.mark.parametrize("is_given", [False, True])
def test_low_rank_rows_are_laid_behind_rows_that_keep_their_values(is_given):
    roomy, rows_TD, low_TR = PaddedBuffer(), torch.randn(4, 16), torch.randn(4, 3)
    with fresh_memory_is_nan():
        given_TD = roomy.give(rows_TD, num_ranks=3).copy_(rows_TD) if is_given else rows_TD
        whole = roomy.with_low(given_TD, low_TR)
    assert torch.equal(whole, torch.cat([rows_TD, low_TR, torch.zeros(4, 5)], dim=1))
    assert (whole.data_ptr() == given_TD.data_ptr()) == is_given


def test_room_keeps_no_memory():
    roomy = PaddedBuffer()
    assert roomy.give(torch.ones(4, 16), num_ranks=8).untyped_storage().data_ptr()
    assert roomy._memory() is None


def with_rank(part, rank):
    a_RI, b_OR = torch.randn(rank, part.weight.shape[1]), torch.randn(part.num_outputs, rank)
    return part._replace(a_RI=a_RI, b_OR=b_OR, copy_a_RI=a_RI, copy_b_OR=b_OR)


def test_an_adapter_that_the_room_is_too_small_for_is_served_by_a_copy():
    fused_linear, down = make_joint(), make_down(rank=3)
    for one in (fused_linear, down):
        one.dense.fuse_buffer(one.parts)
        assert one.dense.has_room_beside(one.parts) == (one is fused_linear)
        assert one.dense.has_room_below(one.parts[0]) == (one is down)
    # Below the first weight lie the others.
    assert not fused_linear.dense.has_room_beside(fused_linear.parts[:1])
    larger = dataclasses.replace(fused_linear, parts=(with_rank(fused_linear.parts[0], 7), *fused_linear.parts[1:]))
    # For few rows nothing is copied.
    check(larger, 1)
    assert fused_linear.dense.memory() == []
    check(larger, MANY)
    assert len(fused_linear.dense.memory()) == 1
    larger = dataclasses.replace(down, parts=(with_rank(down.parts[0], 9),))
    check_apart(larger, 1, is_whole=False)
    assert down.dense.memory() == []
    check_apart(larger, 32, is_whole=True)
    assert len(down.dense.memory()) == 1
    # And a smaller one leaves room.
    check(
        dataclasses.replace(
            fused_linear,
            parts=(
                with_rank(fused_linear.parts[0], 1),
                without_adapters(fused_linear.parts[1]),
                without_adapters(fused_linear.parts[2]),
            ),
        ),
        1,
    )


def test_weights_that_were_given_other_memory_are_settled_no_more():
    fused_linear = make_joint()
    weight_buffer = fused_linear.dense.fuse_buffer(fused_linear.parts)
    other = torch.randn(NUM_OUTPUTS[1], NUM_INPUTS)
    fused_linear.parts[1].weight.data = other
    assert not fused_linear.dense.has_room_beside(fused_linear.parts)
    check(fused_linear, 1)
    check(fused_linear, MANY)
    # The others still share theirs.
    assert weight_buffer.is_there()
    weight_buffer.give_back()
    assert fused_linear.parts[1].weight.data_ptr() == other.data_ptr()
    assert all(part.weight.untyped_storage().nbytes() == part.weight.nbytes for part in fused_linear.parts)


def test_a_weight_that_has_no_memory_to_go_back_to_stays_and_a_warning_says_so(monkeypatch):
    fused_linear = make_joint()
    values = [part.weight.detach().clone() for part in fused_linear.parts]
    weight_buffer = fused_linear.dense.fuse_buffer(fused_linear.parts)

    def full(*_, **__):
        raise torch.OutOfMemoryError("full")

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "clone", full)
        with pytest.warns(UserWarning, match="stays next to its adapter") as warned:
            weight_buffer.give_back()
    assert len(warned) == 3
    assert all(torch.equal(part.weight, value) for part, value in zip(fused_linear.parts, values))
    check(fused_linear, 1)
    weight_buffer.give_back()
    assert not weight_buffer.is_there()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "zeros", full)
        assert fused_linear.dense.fuse_buffer(fused_linear.parts) is None
    assert all(part.weight.untyped_storage().nbytes() == part.weight.nbytes for part in fused_linear.parts)


@pytest.mark.parametrize("make", [make_joint, make_down])
def test_room_that_is_written_changes_no_version_of_a_weight(make):
    fused_linear = make()
    fused_linear.dense.fuse_buffer(fused_linear.parts)
    x_TI = torch.randn(3, fused_linear.num_inputs, requires_grad=True)
    # Somebody else's backward reads the weight too.
    y_TO = nn.functional.linear(x_TI, fused_linear.parts[0].weight)
    run(fused_linear, 3)
    y_TO.sum().backward()
    assert x_TI.grad.abs().sum() > 0


def test_weights_are_settled_and_given_back_in_inference_mode_for_training_later():
    fused_linear = make_joint()
    with torch.inference_mode():
        weight_buffer = fused_linear.dense.fuse_buffer(fused_linear.parts)
    assert not any(part.weight.is_inference() for part in fused_linear.parts)
    check(fused_linear, 1)
    with torch.inference_mode():
        weight_buffer.give_back()
    assert not any(part.weight.is_inference() for part in fused_linear.parts)
    check(fused_linear, 1)


def test_old_weights_are_not_kept_alive():
    fused_linear = make_joint()
    weight_buffer = fused_linear.dense.fuse_buffer(fused_linear.parts)
    memory = weakref.ref(fused_linear.parts[0].weight)
    del fused_linear
    gc.collect()
    assert memory() is None
    assert not weight_buffer.is_there()
    weight_buffer.give_back()


@pytest.mark.parametrize("what", ["trained", "packed", "a view", "no adapters"])
def test_other_weights_stay_where_they_are(what, monkeypatch):
    fused_linear = make_joint(is_trained=what == "trained", stride=8 if what == "a view" else 0)
    if what == "packed":
        fused_linear = packed(fused_linear, monkeypatch)
    if what == "no adapters":
        fused_linear = dataclasses.replace(
            fused_linear, parts=tuple(without_adapters(part) for part in fused_linear.parts)
        )
    places = [part.weight.data_ptr() for part in fused_linear.parts]
    assert fused_linear.dense.fuse_buffer(fused_linear.parts) is None
    assert [part.weight.data_ptr() for part in fused_linear.parts] == places


def test_memory_of_settled_weights_is_freed_with_them():
    fused_linear = make_joint()
    weight_buffer, dense = fused_linear.dense.fuse_buffer(fused_linear.parts), fused_linear.dense
    del fused_linear
    gc.collect()
    assert weight_buffer._memory.expired()
    # Another weight at the same address is none of them.
    other = make_joint()
    dense._fused = {other.parts[0].weight.data_ptr(): buffer for buffer in dense._fused.values()}
    assert not dense.has_room_beside(other.parts)


def test_from_so_many_rows_on_weights_are_copied_next_to_their_adapters():
    fused_linear = make_joint()
    run(fused_linear, MANY - 1)
    assert fused_linear.dense.memory() == []
    run(fused_linear, MANY)
    (buffer,) = fused_linear.dense.memory()
    # Seven ranks take eight columns.
    assert buffer.numel() == sum(NUM_OUTPUTS) * (NUM_INPUTS + 8)
    dense = buffer.view(sum(NUM_OUTPUTS), -1)
    assert torch.equal(dense[:, :NUM_INPUTS], torch.cat([part.weight for part in fused_linear.parts]))
    assert torch.equal(dense[:40, NUM_INPUTS : NUM_INPUTS + 4], fused_linear.parts[0].b_OR)
    assert torch.equal(dense[48:, NUM_INPUTS + 4 : NUM_INPUTS + 7], fused_linear.parts[2].b_OR)


def test_weights_that_are_read_anew_follow_what_was_written():
    fused_linear = make_joint()
    run(fused_linear, MANY)
    with torch.no_grad():
        fused_linear.parts[1].weight.mul_(3.0)
        fused_linear.parts[0].b_OR.mul_(2.0)
    check(fused_linear, MANY)


def test_trained_weights_stay_where_they_are():
    fused_linear = make_joint(is_trained=True)
    check(fused_linear, MANY)
    assert fused_linear.dense.memory() == []


# Columns that make whole words of 8 bytes and columns that do not; weights whose rows are apart.
@pytest.mark.covering
@pytest.mark.parametrize(("num_inputs", "stride"), [(24, 0), (24, 8), (24, 3), (21, 0)])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 5e-3), (torch.float64, 1e-14)]
)
def test_copies_move_whole_words_where_they_can(dtype, tolerance, num_inputs, stride):
    check(make_joint(dtype=dtype, num_inputs=num_inputs, stride=stride), 2 * num_inputs, tolerance=tolerance)


def biased(fused_linear, *, dtype=None):
    """The same layers, each with a bias much larger than a product."""
    parts = []
    for place, part in enumerate(fused_linear.parts):
        bias_O = 100.0 * (place + 1) + torch.arange(float(part.num_outputs))
        parts.append(part._replace(bias=bias_O.to(dtype or part.weight.dtype)))
    return dataclasses.replace(fused_linear, parts=tuple(parts))


def packed(fused_linear, monkeypatch):
    """The same layers as packed weights, which become dense below each other."""
    monkeypatch.setattr(dense_weights, "read_params4bit", lambda weight: weight)
    monkeypatch.setattr(
        dense_weights,
        "dequantise_many",
        lambda weights, *, outs, is_checked: [out.copy_(weight) for out, weight in zip(outs, weights)],
    )
    return dataclasses.replace(fused_linear, parts=tuple(part._replace(is_packed=True) for part in fused_linear.parts))


def count_passes(monkeypatch):
    """The calls that read and write an output once more to add biases."""
    calls, add_bias = [], linears._add_bias

    def count(y_TO, parts, **options):
        calls.append(parts)
        add_bias(y_TO, parts, **options)

    monkeypatch.setattr(linears, "_add_bias", count)
    return calls


def without_adapters(part):
    return part._replace(a_RI=None, b_OR=None, copy_a_RI=None, copy_b_OR=None)


@pytest.mark.covering
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 5e-3), (torch.float64, 1e-14)]
)
@pytest.mark.parametrize("bias_dtype", [None, torch.float32])
def test_biases_are_added_by_the_product_that_carries_adapters(dtype, tolerance, bias_dtype, monkeypatch):
    calls = count_passes(monkeypatch)
    check(biased(make_joint(dtype=dtype), dtype=bias_dtype), MANY, tolerance=tolerance)
    check(biased(packed(make_joint(dtype=dtype), monkeypatch), dtype=bias_dtype), 3, tolerance=tolerance)
    assert calls == []


@pytest.mark.parametrize("num_layers", [1, 3])
def test_biases_are_added_by_a_product_without_adapters(num_layers, monkeypatch):
    calls = count_passes(monkeypatch)
    fused_linear = biased(make_joint(dtype=torch.bfloat16))
    if num_layers > 1:
        fused_linear = packed(fused_linear, monkeypatch)
    fused_linear = dataclasses.replace(
        fused_linear, parts=tuple(without_adapters(part) for part in fused_linear.parts[:num_layers])
    )
    x_TI = torch.randn(7, NUM_INPUTS).bfloat16()
    with torch.no_grad():
        (y_TO,) = linears.product(fused_linear, x_TI)
        true = torch.cat(
            [x_TI.double() @ part.weight.double().T + part.bias.double() for part in fused_linear.parts], 1
        )
        assert ((y_TO.double() - true).abs() <= torch.finfo(torch.bfloat16).eps * true.abs()).all()
    assert calls == []


def test_weights_that_lie_apart_and_a_product_with_an_addend_get_their_biases_in_a_pass(monkeypatch):
    calls = count_passes(monkeypatch)
    fused_linear = biased(make_joint())
    check(fused_linear, MANY - 1)
    assert len(calls) == 2
    first = dataclasses.replace(fused_linear, parts=(without_adapters(fused_linear.parts[0]),))
    x_TI, addend_TO = torch.randn(7, NUM_INPUTS), torch.randn(7, 40)
    with torch.no_grad():
        (part,) = first.parts
        torch.testing.assert_close(
            linears.product(first, x_TI, addend_TO=addend_TO)[0], addend_TO + x_TI @ part.weight.T + part.bias
        )
    assert len(calls) == 3


def test_a_bias_is_read_in_every_call():
    fused_linear = biased(make_joint())
    check(fused_linear, MANY)
    with torch.no_grad():
        fused_linear.parts[1].bias.mul_(-1.0)
    check(fused_linear, MANY)


BIASED_PRODUCT = linears._biased_product
FAULTS = {
    "adapters of another place": (dense_weights, "write_block_diagonal", lambda out, blocks, is_checked: out.zero_()),
    "weights lost": (dense_weights, "_copy_rows", lambda out, rows: out.zero_()),
    "biases lost": (linears, "_biased_product", lambda x_TI, weight_OI, parts: x_TI @ weight_OI.T),
    "biases of other layers": (
        linears,
        "_biased_product",
        lambda x_TI, weight_OI, parts: BIASED_PRODUCT(x_TI, weight_OI, parts[::-1]),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen(fault, monkeypatch):
    monkeypatch.setattr(*FAULTS[fault])
    with pytest.raises(AssertionError):
        check(make_joint(), MANY)


def with_copies(fused_linear, dtype):
    """The layers with masters in another dtype, and copies of them."""
    parts = [
        part._replace(
            a_RI=None if part.a_RI is None else part.a_RI.to(dtype),
            b_OR=None if part.b_OR is None else part.b_OR.to(dtype),
        )
        for part in fused_linear.parts
    ]
    return dataclasses.replace(fused_linear, parts=tuple(parts))


@pytest.mark.parametrize(("make", "name"), [(make_joint, "copy_b_OR"), (make_down, "copy_a_RI")])
def test_adapters_are_written_next_to_their_weights_when_they_have_changed(make, name):
    plain = make()
    tracked = with_copies(plain, torch.float64)
    assert plain.dense.fuse_buffer(plain.parts) is not None
    memory = buffer_of(plain.parts[0].weight)

    def read(fused_linear):
        parts = fused_linear.parts
        if name == "copy_b_OR":
            return fused_linear.dense.with_adapters(parts, dtype=torch.float32)
        return fused_linear.dense.above_adapter(parts[0], parts[0].copy_a_RI)

    expected = read(tracked).clone()
    memory_before = memory.clone()
    # What is written once more would repair this.
    room = memory[:, plain.num_inputs :] if name == "copy_b_OR" else memory[plain.parts[0].num_outputs :]
    room.fill_(7.0)
    assert not torch.equal(read(tracked), expected)
    # Optimizers write a master in the compute dtype without a trace.
    assert torch.equal(read(plain), expected)
    assert torch.equal(memory, memory_before)
    read(tracked)
    copy = next(getattr(part, name) for part in tracked.parts if getattr(part, name) is not None)
    with torch.no_grad():
        copy.add_(1.0)
    assert not torch.equal(read(tracked), expected)
    # Another adapter's may be as new.
    others = []
    for part in tracked.parts:
        old = getattr(part, name)
        new = None if old is None else old + 1.0
        for _ in range(0 if old is None else old._version):
            new.add_(0.0)
        others.append(part._replace(**{name: new}))
    other = dataclasses.replace(tracked, parts=tuple(others))
    assert torch.equal(read(other), read(dataclasses.replace(other, dense=DenseWeights())))
