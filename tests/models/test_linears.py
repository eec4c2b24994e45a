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


FAULTS = {
    "adapters of another place": ("write_block_diagonal", lambda out, blocks: out.zero_()),
    "weights of another call": ("_copy_rows", lambda out, rows: None),
    "outputs of the first layer doubled": ("_add_bias", lambda y, parts: y[:, :40].mul_(2.0)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen(fault, monkeypatch):
    monkeypatch.setattr(linears, *FAULTS[fault])
    with pytest.raises(AssertionError):
        check(make_joint(), MANY)
