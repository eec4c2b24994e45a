"""Layers that read the same rows: adapters inside the base's product where rows are many, beside it where they are few, with the same numbers."""

import pytest
import torch
from torch import nn

from lightning_fastft.models import linears
from lightning_fastft.models.linears import DenseWeights, Joint, LinearPart

NUM_INPUTS, NUM_OUTPUTS, RANKS = 24, (40, 8, 16), (4, 0, 3)
MANY = linears._COPIED_FROM_ROWS_PER_INPUT * NUM_INPUTS


def make_joint(*, dtype=torch.float32, is_trained=False, num_inputs=NUM_INPUTS, stride=0):
    """Three layers, the second without an adapter; with a stride, weights whose rows are apart."""
    generator = torch.Generator().manual_seed(0)

    def numbers(*shape):
        return torch.randn(shape, generator=generator).to(dtype)

    parts = []
    for place, (num_outputs, rank) in enumerate(zip(NUM_OUTPUTS, RANKS)):
        base = nn.Linear(num_inputs, num_outputs, bias=place == 2, dtype=dtype).requires_grad_(is_trained and place == 0)
        base.weight.data = numbers(num_outputs, num_inputs + stride)[:, :num_inputs]
        a_RI, b_OR = (numbers(rank, num_inputs), numbers(num_outputs, rank)) if rank else (None, None)
        parts.append(LinearPart(base, base.weight, base.bias, a_RI, b_OR, a_RI, b_OR, 0.5 + place, num_outputs, False))
    return Joint(tuple(parts), DenseWeights())


@torch.no_grad()
def run(joint, num_rows, *, has_room=True):
    """Output, narrow rows, and the gradients of rows and narrow rows."""
    generator = torch.Generator().manual_seed(1)
    like_TI = torch.randn(num_rows, joint.num_inputs, generator=generator).to(joint.parts[0].weight.dtype)
    x_TI = linears.rows_for(joint, like_TI).copy_(like_TI) if has_room else like_TI.clone()
    out = linears.product(joint, x_TI)
    d_TO = torch.randn(out.y_TO.shape, generator=generator).to(like_TI.dtype)
    return x_TI, d_TO, (out.y_TO, out.low_TR, *linears.rows_gradients(joint, d_TO, needs_x=True))


def truth(joint, x_TI, d_TO):
    """The same in float64, from the definition."""
    x_TI, d_TO = x_TI.double(), d_TO.double()
    y, low, d_low, d_x, start = [], [], [], 0.0, 0
    for part in joint.parts:
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


def check(joint, num_rows, *, tolerance=1e-6, **options):
    x_TI, d_TO, found = run(joint, num_rows, **options)
    for one, other in zip(found, truth(joint, x_TI, d_TO), strict=True):
        assert one.shape == other.shape
        assert ((one.double() - other).norm() / other.norm()).item() < tolerance
    _, _, again = run(joint, num_rows, **options)
    assert all(torch.equal(one, other) for one, other in zip(found, again))


@pytest.mark.parametrize("num_rows", [1, MANY - 1, MANY, MANY + 17])
@pytest.mark.parametrize("has_room", [False, True])
def test_outputs_and_gradients_are_those_of_the_definition(num_rows, has_room):
    check(make_joint(), num_rows, has_room=has_room)


@torch.no_grad()
@pytest.mark.parametrize("num_rows", [1, MANY - 1, MANY])
def test_gradients_apart_are_those_of_the_definition_once_they_are_added(num_rows):
    joint = make_joint()
    x_TI, d_TO, (_, _, d_x_TI, d_low_TR) = run(joint, num_rows)
    rest_TI, d_low_again_TR, a_RI = linears.rows_gradients_apart(joint, d_TO)
    _, _, true_d_x_TI, _ = truth(joint, x_TI, d_TO)
    whole_TI = rest_TI.double() + d_low_again_TR.double() @ a_RI.double()
    assert ((whole_TI - true_d_x_TI).norm() / true_d_x_TI.norm()).item() < 1e-6
    assert torch.equal(d_low_again_TR, d_low_TR)
    assert torch.equal(rest_TI.addmm_(d_low_again_TR, a_RI), d_x_TI)


def test_without_adapters_nothing_is_left_apart():
    joint = make_joint()
    bare = joint._replace(parts=joint.parts[1:2])
    d_TO = torch.randn(5, NUM_OUTPUTS[1])
    rest_TI, d_low_TR, a_RI = linears.rows_gradients_apart(bare, d_TO)
    assert d_low_TR is a_RI is None
    assert torch.equal(rest_TI, linears.input_gradient(bare, d_TO, None))


def test_from_so_many_rows_on_weights_are_copied_next_to_their_adapters():
    joint = make_joint()
    run(joint, MANY - 1)
    assert joint.dense.memory() == []
    run(joint, MANY)
    (buffer,) = joint.dense.memory()
    # Seven ranks take eight columns.
    assert buffer.numel() == sum(NUM_OUTPUTS) * (NUM_INPUTS + 8)
    dense = buffer.view(sum(NUM_OUTPUTS), -1)
    assert torch.equal(dense[:, :NUM_INPUTS], torch.cat([part.weight for part in joint.parts]))
    assert torch.equal(dense[:40, NUM_INPUTS : NUM_INPUTS + 4], joint.parts[0].b_OR)
    assert torch.equal(dense[48:, NUM_INPUTS + 4 : NUM_INPUTS + 7], joint.parts[2].b_OR)


def test_weights_that_are_read_anew_follow_what_was_written():
    joint = make_joint()
    run(joint, MANY)
    with torch.no_grad():
        joint.parts[1].weight.mul_(3.0)
        joint.parts[0].b_OR.mul_(2.0)
    check(joint, MANY)


def test_trained_weights_stay_where_they_are():
    joint = make_joint(is_trained=True)
    check(joint, MANY)
    assert joint.dense.memory() == []


# Columns that make whole words of 8 bytes and columns that do not; weights whose rows are apart.
@pytest.mark.parametrize(("num_inputs", "stride"), [(24, 0), (24, 8), (24, 3), (21, 0)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 5e-3), (torch.float64, 1e-14)])
def test_copies_move_whole_words_where_they_can(dtype, tolerance, num_inputs, stride):
    check(make_joint(dtype=dtype, num_inputs=num_inputs, stride=stride), 2 * num_inputs, tolerance=tolerance)


def biased(joint, *, dtype=None):
    """The same layers, each with a bias much larger than a product."""
    parts = []
    for place, part in enumerate(joint.parts):
        bias_O = 100.0 * (place + 1) + torch.arange(float(part.num_outputs))
        parts.append(part._replace(bias=bias_O.to(dtype or part.weight.dtype)))
    return joint._replace(parts=tuple(parts))


def packed(joint, monkeypatch):
    """The same layers as packed weights, which become dense below each other."""
    monkeypatch.setattr(linears, "read_params4bit", lambda weight: weight)
    monkeypatch.setattr(linears, "dequantise_many", lambda weights, *, outs: [out.copy_(weight) for out, weight in zip(outs, weights)])
    return joint._replace(parts=tuple(part._replace(is_packed=True) for part in joint.parts))


def count_passes(monkeypatch):
    """The calls that read and write an output once more to add biases."""
    calls, add_bias = [], linears._add_bias
    monkeypatch.setattr(linears, "_add_bias", lambda y_TO, parts: (calls.append(parts), add_bias(y_TO, parts)))
    return calls


def without_adapters(part):
    return part._replace(a_RI=None, b_OR=None, narrow_a_RI=None, narrow_b_OR=None)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 5e-3), (torch.float64, 1e-14)])
@pytest.mark.parametrize("bias_dtype", [None, torch.float32])
def test_biases_are_added_by_the_product_that_carries_adapters(dtype, tolerance, bias_dtype, monkeypatch):
    calls = count_passes(monkeypatch)
    check(biased(make_joint(dtype=dtype), dtype=bias_dtype), MANY, tolerance=tolerance)
    check(biased(packed(make_joint(dtype=dtype), monkeypatch), dtype=bias_dtype), 3, tolerance=tolerance)
    assert calls == []


@pytest.mark.parametrize("num_layers", [1, 3])
def test_biases_are_added_by_a_product_without_adapters(num_layers, monkeypatch):
    calls = count_passes(monkeypatch)
    joint = biased(make_joint(dtype=torch.bfloat16))
    if num_layers > 1:
        joint = packed(joint, monkeypatch)
    joint = joint._replace(parts=tuple(without_adapters(part) for part in joint.parts[:num_layers]))
    x_TI = torch.randn(7, NUM_INPUTS).bfloat16()
    with torch.no_grad():
        out = linears.product(joint, x_TI)
        true = torch.cat([x_TI.double() @ part.weight.double().T + part.bias.double() for part in joint.parts], 1)
        assert ((out.y_TO.double() - true).abs() <= torch.finfo(torch.bfloat16).eps * true.abs()).all()
    assert calls == []


def test_weights_that_lie_apart_and_a_product_with_an_addend_get_their_biases_in_a_pass(monkeypatch):
    calls = count_passes(monkeypatch)
    joint = biased(make_joint())
    check(joint, MANY - 1)
    assert len(calls) == 2
    first = joint._replace(parts=(without_adapters(joint.parts[0]),))
    x_TI, addend_TO = torch.randn(7, NUM_INPUTS), torch.randn(7, 40)
    with torch.no_grad():
        (part,) = first.parts
        torch.testing.assert_close(linears.product(first, x_TI, addend_TO=addend_TO).y_TO, addend_TO + x_TI @ part.weight.T + part.bias)
    assert len(calls) == 3


def test_a_bias_is_read_in_every_call():
    joint = biased(make_joint())
    check(joint, MANY)
    with torch.no_grad():
        joint.parts[1].bias.mul_(-1.0)
    check(joint, MANY)


BIASED_PRODUCT = linears._biased_product
FAULTS = {
    "adapters of another place": ("write_block_diagonal", lambda out, blocks: out.zero_()),
    "weights lost": ("_copy_rows", lambda out, rows: out.zero_()),
    "biases lost": ("_biased_product", lambda x_TI, weight_OI, parts: x_TI @ weight_OI.T),
    "biases of other layers": ("_biased_product", lambda x_TI, weight_OI, parts: BIASED_PRODUCT(x_TI, weight_OI, parts[::-1])),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen(fault, monkeypatch):
    monkeypatch.setattr(linears, *FAULTS[fault])
    with pytest.raises(AssertionError):
        check(make_joint(), MANY)
